"""GPTQ (Frantar et al., 2022, https://arxiv.org/abs/2210.17323).

Columns are rounded one after the other. The error of each is compensated by the columns that are not rounded yet, as
far as the correlations of the inputs allow.
"""

import torch
from torch import Tensor

from fastinfer.errors import QuantizationError
from fastinfer.formats.unpacked import Unpacked
from fastinfer.quantize.rounding import Grid
from fastinfer.quantize.statistics import InputStatistics
from fastinfer.utils.torch_threads import one_torch_thread

BLOCK = 128  # columns whose corrections are applied to the rest at once


def quantize_gptq(
    values: Tensor,
    statistics: InputStatistics,
    bits: int,
    group_size: int,
    *,
    symmetric: bool = False,
    act_order: bool = True,
    damping: float = 0.01,
) -> Unpacked:
    """Quantise a weight.

    Args:
        values: [rows, cols] fp32, the weight.
        statistics: statistics of its inputs.
        bits: number of bits, 2 to 8.
        group_size: number of inputs that share a scale; must divide cols.
        symmetric: see :meth:`Grid.of`.
        act_order: round the columns with the largest inputs first. The scales are still those of the original groups,
            so that the result needs no permutation.
        damping: multiple of the Hessian's mean diagonal, without the columns whose input is always 0, that is added to
            its diagonal.

    Raises:
        QuantizationError: the Hessian has no Cholesky decomposition: its numbers are not finite, or too far apart.
    """
    # Columns whose input is always 0 cause no error; with any positive diagonal they are rounded independently.
    diagonal = statistics.hessian.diagonal().clone()
    dead = diagonal == 0
    mean = diagonal[~dead].mean() if not bool(dead.all()) else diagonal.new_ones(())
    diagonal[dead] = mean
    order = diagonal.argsort(descending=True, stable=True) if act_order else torch.arange(len(diagonal))
    spread = _spread(statistics.hessian, diagonal + damping * mean, order)

    grid = Grid.of(values, bits, group_size, symmetric)
    groups = order // group_size
    weights = values[:, order].T.contiguous()  # transposed, so that a column of the weight is contiguous
    q = torch.empty_like(weights)
    for start in range(0, len(order), BLOCK):
        end = min(start + BLOCK, len(order))
        errors = weights.new_empty(end - start, weights.shape[1])
        with one_torch_thread():
            for i in range(start, end):
                column = weights[i]
                scale, zero = grid.scales[:, groups[i]], grid.zeros[:, groups[i]]
                q[i] = (column / scale).round_().add_(zero).clamp_(0, grid.levels - 1)
                error = (column - (q[i] - zero) * scale) / spread[i, i]
                weights[i + 1 : end].addr_(spread[i, i + 1 : end], error, alpha=-1)
                errors[i - start] = error
        weights[end:].addmm_(spread[start:end, end:].T, errors, alpha=-1)
    return grid.unpacked(q[order.argsort()].T.contiguous())


def _spread(hessian: Tensor, diagonal: Tensor, order: Tensor) -> Tensor:
    """Return the upper Cholesky factor of the inverse of a Hessian with another diagonal, columns in this order.

    Row i says how the error in column i is distributed over the columns after it. Large layers have Hessians of
    hundreds of megabytes: the one copy is overwritten step by step, for which LAPACK wants its columns contiguous.
    """
    factor = hessian[order[:, None], order].T
    factor.diagonal().copy_(diagonal[order])
    try:
        torch.linalg.cholesky(factor, out=factor)
        torch.cholesky_inverse(factor, out=factor)
        torch.linalg.cholesky(factor, out=factor)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        raise QuantizationError(
            "expected inputs whose correlations have a Cholesky decomposition, got numbers that are not finite or too "
            "far apart; another calibration text or method may do"
        ) from None
    return factor.T
