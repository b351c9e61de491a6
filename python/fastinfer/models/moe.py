"""MLP of a mixture of experts, as in Mixtral and Qwen3-MoE, perhaps with a shared expert, as in DeepSeek's models."""

from dataclasses import dataclass

from torch import Tensor

from fastinfer import ops
from fastinfer.models.activation import activation_and_mul, plain_activation
from fastinfer.models.config import RouterConfig
from fastinfer.models.lora import LayerAdapters
from fastinfer.models.moves import moved
from fastinfer.models.norm import Norm, RMSNorm
from fastinfer.ops.pack import TILE_ROWS
from fastinfer.weights.expert_weights import ExpertWeights
from fastinfer.weights.weight import Weight


@dataclass(frozen=True, eq=False)
class SharedExpert:
    """Expert of all tokens, ``down(activation(gate x) * up x)``, or without a gate ``down(activation(up x))``.

    If there is a ``token_gate``, its output is multiplied by ``sigmoid(token_gate x)``, one number for each token.

    Attributes:
        gate_up: projections gate and up, with rows interleaved in runs of 16, or up alone.
        down: [hidden, intermediate].
        token_gate: [1, hidden], or ``None``.
        activation: activation of the gate, by its name in :mod:`fastinfer.ops.gemm`, or of up, see
            :func:`fastinfer.models.activation.plain_activation`.
        gated: whether there is a gate.
        limit: limit of both factors, with ``"silu"``, see :func:`fastinfer.ops.silu_and_mul`; the activation is then a
            separate operator. ``None`` for none.
    """

    gate_up: Weight
    down: Weight
    token_gate: Weight | None
    activation: str
    gated: bool = True
    limit: float | None = None

    def __call__(self, x: Tensor, residual: Tensor | None, lora: LayerAdapters | None) -> Tensor:
        """Return the output of the expert for ``x``, plus ``residual`` if there is one; all are [tokens, hidden]."""
        hidden = self.down.gather_input(self._hidden(x, lora))
        out = self.down.linear(hidden, residual=None if self.token_gate else residual)
        if lora is not None:
            lora.add("shared_expert.down_proj", out, hidden)
        if self.token_gate is None:
            return out
        logits = self.token_gate.linear(x)
        if lora is not None:
            lora.add("shared_expert_gate", logits, x)
        # The sigmoid is the weight of a token's only choice among one expert.
        routing = ops.route_experts(logits, 1, False, scoring="sigmoid")
        return ops.combine_experts(out, routing.expert_weights, residual)

    def _hidden(self, x: Tensor, lora: LayerAdapters | None) -> Tensor:
        """Return the activated products of gate and up, [tokens, intermediate]."""
        if not self.gated:
            up = self.gate_up.linear(x)
            if lora is not None:
                lora.add("shared_expert.up_proj", up, x)
            return plain_activation(up, self.activation)
        if lora is None and self.limit is None:
            return self.gate_up.linear(x, activation=self.activation)
        gate_up = self.gate_up.linear(x).view(len(x), -1, 2, TILE_ROWS)
        if lora is not None:
            lora.add("shared_expert.gate_proj", gate_up[:, :, 0], x)
            lora.add("shared_expert.up_proj", gate_up[:, :, 1], x)
        return activation_and_mul(gate_up.flatten(2), self.activation, self.limit).view(len(x), -1)


@dataclass(frozen=True, eq=False)
class ExpertLatents:
    """Projections before and behind experts that compute on fewer elements than hidden states have.

    Attributes:
        input: [latent, hidden], projection of the experts' inputs.
        output: [hidden, latent], projection of the weighted sum of their outputs.
    """

    input: Weight
    output: Weight


@dataclass(frozen=True, eq=False)
class MixtureOfExperts:
    """Mixture of experts: the weighted sum of ``down_e(activation(gate_e x) * up_e x)`` over a token's chosen experts.

    Without gates it is that of ``down_e(activation(up_e x))``.

    It takes six kernel calls, which can be recorded as a graph: norm, router, routing, gate/up + activation, down,
    weighted sum + residual. A shared expert takes two more, or four with a gate. In a step with LoRA adapters, the
    updates of gate and up are added before the activation, which is then a separate operator. With latents it takes two
    more; the router and the shared expert read the hidden states.

    Attributes:
        norm: norm of the input.
        router: [experts, hidden].
        gate_up: [experts, 2 * intermediate, hidden]; gate and up rows of each expert, interleaved in runs of 16; or
            up alone.
        down: [experts, hidden, intermediate].
        top_k: number of experts per token.
        routing: how they are chosen.
        activation: activation of the gate or of up, as in :class:`SharedExpert`.
        choice_bias: [experts] fp32, takes part in the choice; or ``None``.
        shared: expert of all tokens, or ``None``.
        latents: projections around the experts, or ``None``; ``gate_up`` and ``down`` then have the latents' width in
            the place of ``hidden``.
        router_norm: norm of the router's input, if it is not that of the experts.
        expert_scale: [experts] fp32, factors of the experts' weights; or ``None``.
        post_norm: norm of the output, or a factor of it in the form of a norm; or ``None``.
        gated: whether experts have a gate.
        limit: as in :class:`SharedExpert`, of the experts but the shared one.
        experts_device: device of ``gate_up`` and ``down``, if it is not that of the other weights; ``None`` otherwise.
            The inputs of the experts are copied there, and their outputs back. Their adapters are there, too.
    """

    norm: Norm
    router: Weight
    gate_up: ExpertWeights
    down: ExpertWeights
    top_k: int
    routing: RouterConfig
    activation: str
    choice_bias: Tensor | None = None
    shared: SharedExpert | None = None
    latents: ExpertLatents | None = None
    router_norm: RMSNorm | None = None
    expert_scale: Tensor | None = None
    post_norm: RMSNorm | None = None
    gated: bool = True
    limit: float | None = None
    experts_device: str | None = None

    def __call__(self, x: Tensor, residual: Tensor, lora: LayerAdapters | None) -> Tensor:
        """Return ``residual`` [tokens, hidden] plus the output of the experts for ``x`` [tokens, hidden]."""
        routed, x = x, self.norm(x)
        routed = x if self.router_norm is None else self.router_norm(routed)
        logits = self.router.linear(routed)
        if lora is not None:
            lora.add("router", logits, routed)
        if self.routing.softcap:
            ops.softcap(logits, self.routing.softcap)
        routing, scaled = self._route(logits), x
        if self.routing.scales_inputs:  # and outputs are not: the second call gives weights of 1
            scaled = ops.combine_experts(x, routing.expert_weights, None)
            routing = self._route(logits, is_weighted=False)
        if self.latents is not None:
            scaled = self.latents.input.linear(scaled)
        away = self.experts_device
        inputs = (scaled, routing, lora) if away is None else moved((scaled, routing, lora), away)
        stream = residual if self.post_norm is None else None  # which is added behind the norm
        addend = self.down.own_residual(stream)
        if self.shared is not None:  # before the experts, so that a GPU computes it while a CPU computes them
            addend = self.shared(x, addend, lora)
        out = self._experts(*inputs)
        if away is not None:
            out = moved(out, str(x.device))
        projection = None if self.latents is None else self.latents.output
        combined = self.down.combine(out, routing, addend, stream, projection)
        return combined if self.post_norm is None else self.post_norm(combined, residual)

    def _route(self, logits: Tensor, *, is_weighted: bool = True) -> ops.Routing:
        """Choose the experts; the weight of a token's only one is 1 if not ``is_weighted``."""
        config = self.routing
        return ops.route_experts(
            logits,
            self.top_k,
            config.renormalize or not is_weighted,
            scoring=config.scoring,
            bias=self.choice_bias,
            num_groups=config.num_groups,
            top_groups=config.top_groups,
            scale=config.scale,
            expert_scale=self.expert_scale,
            jitter=config.jitter,
            biased_logits=config.biased_logits,
        )

    def _experts(self, x: Tensor, routing: ops.Routing, lora: LayerAdapters | None) -> Tensor:
        """Return the output of each chosen expert, [tokens * top_k, hidden]."""
        hidden = self.down.gather_input(self._hidden(x, routing, lora))
        with ops.prompt_rows_of_experts(self.top_k):
            out = self.down.linear(hidden, routing)
        if lora is not None:
            lora.add("experts.down_proj", out, hidden, routing.expert_ids)
        return out

    def _hidden(self, x: Tensor, routing: ops.Routing, lora: LayerAdapters | None) -> Tensor:
        """Return the activated products of gate and up, [tokens * top_k, intermediate]."""
        if not self.gated:
            up = self.gate_up.linear(x, routing)
            if lora is not None:
                lora.add("experts.up_proj", up, x, routing.expert_ids)
            return plain_activation(up, self.activation)
        if lora is None and self.limit is None:
            return self.gate_up.linear(x, routing, activation=self.activation)
        gate_up = self.gate_up.linear(x, routing).view(len(routing.row_ids), -1, 2, TILE_ROWS)
        if lora is not None:
            lora.add("experts.gate_proj", gate_up[:, :, 0], x, routing.expert_ids)
            lora.add("experts.up_proj", gate_up[:, :, 1], x, routing.expert_ids)
        return activation_and_mul(gate_up.flatten(2), self.activation, self.limit).view(len(gate_up), -1)
