"""GPTQ (Frantar et al., 2022, https://arxiv.org/abs/2210.17323).

Columns are rounded one after the other. The error of each is compensated by the columns that are not rounded yet, as
far as the correlations of the inputs allow.
"""

import torch
from torch import Tensor

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
        damping: multiple of the Hessian's mean diagonal that is added to its diagonal.
    """
    # Columns whose input is always 0 cause no error; with this diagonal they are rounded independently.
    hessian = statistics.hessian.clone()
    diagonal = hessian.diagonal()
    dead = diagonal == 0
    diagonal[dead] = 1.0
    order = diagonal.argsort(descending=True, stable=True) if act_order else torch.arange(len(diagonal))
    diagonal += damping * diagonal.mean()
    hessian = hessian[order][:, order]
    # Row i of the upper factor says how the error in column i is distributed over the columns after it.
    spread = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(hessian)), upper=True)

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
