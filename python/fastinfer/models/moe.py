"""The MLP of a mixture of experts, as Mixtral and Qwen3-MoE have it."""

from dataclasses import dataclass

from torch import Tensor

from fastinfer import ops
from fastinfer.models.lora import LayerAdapters
from fastinfer.models.norm import RMSNorm
from fastinfer.weights.expert_weights import ExpertWeights
from fastinfer.weights.weight import Weight


@dataclass(frozen=True, eq=False)
class MixtureOfExperts:
    """``sum of weight_e * down_e(activation(gate_e x) * up_e x)`` over the experts that the router chooses for a token.

    Six kernel calls, recordable as a graph: norm, router, routing, gate/up + activation, down, weighted sum + residual.

    Attributes:
        norm: of the input.
        router: [experts, hidden].
        gate_up: [experts, 2 * intermediate, hidden], each expert's gate and up rows interleaved in runs of 16.
        down: [experts, hidden, intermediate].
        top_k: experts of a token.
        renormalize: whether their weights are divided by their sum.
        activation: of the gate, by its name in :mod:`fastinfer.ops.gemm`.
    """

    norm: RMSNorm
    router: Weight
    gate_up: ExpertWeights
    down: ExpertWeights
    top_k: int
    renormalize: bool
    activation: str

    def __call__(self, residual: Tensor, lora: LayerAdapters | None) -> Tensor:
        """``residual`` [tokens, hidden] and what the experts make of it; adapters reach none of them."""
        x = self.norm(residual)
        routing = ops.route_experts(self.router.linear(x), self.top_k, self.renormalize)
        hidden = self.gate_up.linear(x, routing, activation=self.activation)
        return ops.combine_experts(self.down.linear(hidden, routing), routing.expert_weights, residual)
