"""Output projections of which each rank has some columns or experts, and whose products the ranks add."""

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import Unpack

from fastinfer import ops
from fastinfer.parallel.reduction import Reduction
from fastinfer.weights.expert_weights import ExpertWeights
from fastinfer.weights.weight import LinearOptions, Weight


@dataclass(frozen=True, eq=False)
class ReducedOutput(Weight):
    """Output projection of attention or of an MLP.

    Attributes:
        local: columns of this rank, for the inputs that it computes; with the bias on rank 0 alone.
        reduction: sum of the products.
    """

    local: Weight
    reduction: Reduction

    @property
    def out_features(self) -> int:  # type: ignore[override]
        return self.local.out_features

    def linear(self, x: Tensor, **options: Unpack[LinearOptions]) -> Tensor:
        residual = options.get("residual")
        options["residual"] = self.reduction.own_residual(residual)
        return self.reduction(self.local.linear(x, **options), residual)

    def rows(self, ids: Tensor | None, dtype: torch.dtype) -> Tensor:
        raise ValueError("the rows of a projection that ranks share cannot be looked up")


@dataclass(frozen=True, eq=False)
class ReducedExperts(ExpertWeights):
    """Weight of experts, of which each rank has some; rows of others are not computed.

    Attributes:
        local: experts of this rank.
        experts: their numbers.
        reduction: sum of what the ranks' experts compute for a token.
    """

    local: ExpertWeights
    experts: range
    reduction: Reduction

    def linear(self, x: Tensor, routing: ops.Routing | ops.HeadRows, *, activation: str | None = None) -> Tensor:
        start = routing.expert_start[self.experts.start : self.experts.stop + 1]
        return self.local.linear(x, routing._replace(expert_start=start), activation=activation)

    def own_residual(self, residual: Tensor | None) -> Tensor | None:
        return self.reduction.own_residual(residual)

    def combine(
        self,
        rows: Tensor,
        routing: ops.Routing,
        addend: Tensor | None,
        residual: Tensor | None = None,
        projection: Weight | None = None,
    ) -> Tensor:
        own = routing.expert_ids, self.experts.start, self.experts.stop
        if projection is None:
            part = ops.combine_experts(rows, routing.expert_weights, addend, *own)
        else:  # of this rank's sum, so that the ranks exchange nothing more
            part = projection.linear(ops.combine_experts(rows, routing.expert_weights, None, *own), residual=addend)
        return self.reduction(part, residual)
