"""Sum of what the ranks compute for the residual stream, and the norm of the sum that follows."""

from dataclasses import dataclass, field

from torch import Tensor

from fastinfer import ops
from fastinfer.models.norm import RMSNorm
from fastinfer.parallel.group import Team
from fastinfer.weights.weight import NormOptions


@dataclass(frozen=True, eq=False)
class NormOfSum(RMSNorm):
    """RMSNorm of the residual stream that was computed together with the last sum of all ranks.

    Attributes:
        ready: the normalised stream by ``id`` of the stream, together with the stream, until it is used.
    """

    ready: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __call__(self, x: Tensor, residual: Tensor | None = None, factor: float = 1.0) -> Tensor:
        assert residual is None
        assert factor == 1.0
        return self._take(x)

    def before_linear(self, x: Tensor) -> tuple[Tensor, NormOptions]:
        """Return the normalised input and no options."""
        return self._take(x), {}

    def _take(self, x: Tensor) -> Tensor:
        return self.ready.pop(id(x))[1]


@dataclass(frozen=True, eq=False)
class Reduction:
    """Sum of the ranks' parts of a layer's output, in fp32 and in the order of the ranks, and the residual.

    Parts are exchanged in the dtype of the hidden states: a product rounds its result to that anyway, and half the
    bytes of fp32 are exchanged with 16-bit ones.

    Attributes:
        group: the group of ranks.
        next_norm: norm that follows and is computed with the sum; ``None`` for none.
    """

    group: Team
    next_norm: NormOfSum | None = None

    def own_residual(self, residual: Tensor | None) -> Tensor | None:
        """Return what this rank adds to its part: the residual of rank 0, unless it is added to the sum."""
        return None if self.group.rank or self.next_norm else residual

    def __call__(self, part: Tensor, residual: Tensor | None) -> Tensor:
        """Return ``residual`` plus the sum of the parts of all ranks.

        Args:
            part: [tokens, hidden], this rank's part, to which ``own_residual(residual)`` was added; is overwritten.
            residual: [tokens, hidden], the residual stream; with ``next_norm`` it becomes the result.
        """
        memory, rank, norm = self.group.memory, self.group.rank, self.next_norm
        if norm is None:
            return ops.all_reduce(part, memory, rank, out=part)
        assert residual is not None
        normed = ops.all_reduce_add_rms_norm(part, residual, norm.weight, norm.eps, memory, rank, out=part)
        norm.ready[id(residual)] = residual, normed
        return residual
