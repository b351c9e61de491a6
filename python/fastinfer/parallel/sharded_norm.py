"""Norm of all heads of a token, of which each rank has some."""

from dataclasses import dataclass

from torch import Tensor

from fastinfer import ops
from fastinfer.models.norm import RMSNorm
from fastinfer.parallel.group import Team


@dataclass(frozen=True, eq=False)
class ShardedHeadsNorm(RMSNorm):
    """Norm of the heads of all ranks, which each rank computes before it takes its own.

    Attributes:
        group: the group of ranks.
        widths: number of columns of each rank.
    """

    group: Team
    widths: list[int]

    def __call__(self, x: Tensor, residual: Tensor | None = None, factor: float = 1.0) -> Tensor:
        """Normalise this rank's columns [tokens, widths[rank]]; the rows of the result are strided."""
        assert residual is None
        group, start = self.group, sum(self.widths[: self.group.rank])
        whole = super().__call__(ops.all_gather(x, group.memory, group.rank, self.widths), factor=factor)
        return whole[:, start : start + self.widths[group.rank]]
