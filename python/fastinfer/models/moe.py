"""MLP of a mixture of experts, as in Mixtral and Qwen3-MoE."""

from dataclasses import dataclass

from torch import Tensor

from fastinfer import ops
from fastinfer.models.activation import activation_and_mul
from fastinfer.models.lora import LayerAdapters
from fastinfer.models.norm import RMSNorm
from fastinfer.ops.pack import TILE_ROWS
from fastinfer.weights.expert_weights import ExpertWeights
from fastinfer.weights.weight import Weight


@dataclass(frozen=True, eq=False)
class MixtureOfExperts:
    """Mixture of experts: the weighted sum of ``down_e(activation(gate_e x) * up_e x)`` over a token's chosen experts.

    It takes six kernel calls, which can be recorded as a graph: norm, router, routing, gate/up + activation, down,
    weighted sum + residual. In a step with LoRA adapters, the updates of gate and up are added before the activation,
    which is then a separate operator.

    Attributes:
        norm: norm of the input.
        router: [experts, hidden].
        gate_up: [experts, 2 * intermediate, hidden]; gate and up rows of each expert, interleaved in runs of 16.
        down: [experts, hidden, intermediate].
        top_k: number of experts per token.
        renormalize: whether a token's expert weights are divided by their sum.
        activation: activation of the gate, by its name in :mod:`fastinfer.ops.gemm`.
    """

    norm: RMSNorm
    router: Weight
    gate_up: ExpertWeights
    down: ExpertWeights
    top_k: int
    renormalize: bool
    activation: str

    def __call__(self, residual: Tensor, lora: LayerAdapters | None) -> Tensor:
        """Return ``residual`` [tokens, hidden] plus the output of the experts."""
        x = self.norm(residual)
        logits = self.router.linear(x)
        if lora is not None:
            lora.add("router", logits, x)
        routing = ops.route_experts(logits, self.top_k, self.renormalize)
        hidden = self._hidden(x, routing, lora)
        out = self.down.linear(hidden, routing)
        if lora is not None:
            lora.add("experts.down_proj", out, hidden, routing.expert_ids)
        return ops.combine_experts(out, routing.expert_weights, residual)

    def _hidden(self, x: Tensor, routing: ops.Routing, lora: LayerAdapters | None) -> Tensor:
        """Return the activated products of gate and up, [tokens * top_k, intermediate]."""
        if lora is None:
            return self.gate_up.linear(x, routing, activation=self.activation)
        gate_up = self.gate_up.linear(x, routing).view(len(routing.row_ids), -1, 2, TILE_ROWS)
        lora.add("experts.gate_proj", gate_up[:, :, 0], x, routing.expert_ids)
        lora.add("experts.up_proj", gate_up[:, :, 1], x, routing.expert_ids)
        return activation_and_mul(gate_up.flatten(2), self.activation).view(len(gate_up), -1)
