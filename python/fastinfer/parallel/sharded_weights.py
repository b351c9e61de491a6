"""Weights of which each rank has some rows, in the interface of whole weights."""

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import Unpack

from fastinfer import ops
from fastinfer.parallel.group import Team
from fastinfer.weights.expert_weights import ExpertWeights
from fastinfer.weights.weight import LinearOptions, Weight


@dataclass(frozen=True, eq=False)
class ShardedOutput(Weight):
    """Output projection of attention or of an MLP, whose input each rank has some columns of.

    Attributes:
        local: rows of this rank.
        group: the group of ranks.
        in_widths: columns of the input that each rank has; ``None`` if all have all.
        out_widths: columns of the output of each rank.
        columns: [out_widths[rank]] int64, the numbers from 0 on.
    """

    local: Weight
    group: Team
    in_widths: list[int] | None
    out_widths: list[int]
    columns: Tensor

    @property
    def out_features(self) -> int:  # type: ignore[override]
        return sum(self.out_widths)

    def gather_input(self, x: Tensor) -> Tensor:
        if self.in_widths is None:
            return x
        return ops.all_gather(x, self.group.memory, self.group.rank, self.in_widths)

    def linear(self, x: Tensor, **options: Unpack[LinearOptions]) -> Tensor:
        group = self.group
        residual = options.get("residual")
        if residual is not None:
            # Products read a contiguous residual, and of the recorded operators this one copies columns.
            start = sum(self.out_widths[: group.rank])
            own = residual[:, start : start + self.out_widths[group.rank]]
            options["residual"] = ops.permute_columns(own, self.columns)
        return ops.all_gather(self.local.linear(x, **options), group.memory, group.rank, self.out_widths)

    def rows(self, ids: Tensor | None, dtype: torch.dtype) -> Tensor:
        raise ValueError("the rows of a projection that ranks share cannot be looked up")


@dataclass(frozen=True, eq=False)
class ShardedExperts(ExpertWeights):
    """Output projections of experts, whose inputs each rank has some columns of; see :class:`ShardedOutput`."""

    local: ExpertWeights
    group: Team
    in_widths: list[int]
    out_widths: list[int]

    def gather_input(self, x: Tensor) -> Tensor:
        return ops.all_gather(x, self.group.memory, self.group.rank, self.in_widths)

    def linear(self, x: Tensor, routing: ops.Routing | ops.HeadRows, *, activation: str | None = None) -> Tensor:
        group = self.group
        out = self.local.linear(x, routing, activation=activation)
        return ops.all_gather(out, group.memory, group.rank, self.out_widths)


@dataclass(frozen=True, eq=False)
class ShardedRows(Weight):
    """Weight of which each rank has some rows, and of which all need whole outputs, such as an embedding.

    Attributes:
        local: rows of this rank.
        group: the group of ranks.
        widths: number of rows of each rank.
    """

    local: Weight
    group: Team
    widths: list[int]

    @property
    def out_features(self) -> int:  # type: ignore[override]
        return sum(self.widths)

    def linear(self, x: Tensor, **options: Unpack[LinearOptions]) -> Tensor:
        group = self.group
        return ops.all_gather(self.local.linear(x, **options), group.memory, group.rank, self.widths)

    def rows(self, ids: Tensor | None, dtype: torch.dtype) -> Tensor:
        if ids is None:
            raise ValueError("ids must be a tensor for an embedding that ranks share, got None")
        group = self.group
        start = sum(self.widths[: group.rank])
        end = start + self.widths[group.rank]
        own = self.local.rows(ops.local_ids(ids, start, end), dtype)
        return ops.all_gather_rows(own, ids, group.memory, group.rank, start, end)
