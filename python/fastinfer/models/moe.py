"""MLP of a mixture of experts, as in Mixtral and Qwen3-MoE."""

from dataclasses import dataclass

from torch import Tensor

from fastinfer import ops
from fastinfer.models.lora import LayerAdapters
from fastinfer.models.norm import RMSNorm
from fastinfer.weights.expert_weights import ExpertWeights
from fastinfer.weights.weight import Weight


@dataclass(frozen=True, eq=False)
class MixtureOfExperts:
    """Mixture of experts: the weighted sum of ``down_e(activation(gate_e x) * up_e x)`` over a token's chosen experts.

    It takes six kernel calls, which can be recorded as a graph: norm, router, routing, gate/up + activation, down,
    weighted sum + residual.

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
        """Return ``residual`` [tokens, hidden] plus the output of the experts, which have no adapters (``lora``)."""
        x = self.norm(residual)
        routing = ops.route_experts(self.router.linear(x), self.top_k, self.renormalize)
        hidden = self.gate_up.linear(x, routing, activation=self.activation)
        return ops.combine_experts(self.down.linear(hidden, routing), routing.expert_weights, residual)
