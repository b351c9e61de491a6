"""AWQ (Lin et al., 2023, https://arxiv.org/abs/2306.00978).

Weights of large inputs matter most. They are scaled up before rounding, and the layer that produces the inputs is
scaled down by the same factors.
"""

import torch
from torch import Tensor

from fastinfer.errors import QuantizationError
from fastinfer.quantize.rounding import Grid
from fastinfer.quantize.statistics import InputStatistics

EXPONENTS = 20  # exponents that search_scales tries
SHRINKS = 20  # fractions of the range that search_clipping tries
LEAST_SHRINK = 0.5


def search_scales(
    values: Tensor, statistics: InputStatistics, bits: int, group_size: int, symmetric: bool = False
) -> Tensor:
    """Search for the scales of the inputs, [in_features] fp32, with the smallest error of the output.

    The candidates are ``mean_abs ** a`` for a in 0, 1/20, ... 19/20, normalised so that the product of the largest and
    the smallest scale is 1.

    Args:
        values: [rows, in_features] fp32, the weight.
        statistics: statistics of its inputs.
        bits, group_size, symmetric: see :meth:`Grid.of`.
    """
    best, scales = float("inf"), values.new_ones(values.shape[1])
    importance = statistics.mean_abs.clamp(min=1e-4)
    for step in range(EXPONENTS):
        candidate = importance ** (step / EXPONENTS)
        candidate = candidate / (candidate.amax() * candidate.amin()).sqrt()
        try:
            grid = Grid.of(values * candidate, bits, group_size, symmetric)
        except QuantizationError:
            if step == 0:  # the weight as it is
                raise
            continue
        rounded = grid.dequantize(grid.quantize(values * candidate)) / candidate
        error = statistics.output_error(values - rounded)
        if error < best:
            best, scales = error, candidate
    return scales


def search_clipping(
    values: Tensor, statistics: InputStatistics, bits: int, group_size: int, symmetric: bool = False
) -> Grid:
    """Search for the clipping range of each group with the smallest sum of rounding and clipping errors.

    The error of each group is computed independently, with the correlations among the group's own inputs. The fractions
    of the range are 1, 1 - 1/40, ... 1 - 19/40.

    Args:
        values: [rows, in_features] fp32, the weight.
        statistics: statistics of its inputs.
        bits, group_size, symmetric: see :meth:`Grid.of`.
    """
    groups = values.shape[1] // group_size
    blocks = statistics.hessian.view(groups, group_size, groups, group_size)
    blocks = blocks.diagonal(dim1=0, dim2=2).permute(2, 0, 1)  # [groups, group_size, group_size]
    best = values.new_full((len(values), groups), float("inf"))
    shrink = torch.ones_like(best)
    for step in range(SHRINKS):
        share = 1 - (1 - LEAST_SHRINK) * step / SHRINKS
        grid = Grid.of(values, bits, group_size, symmetric, share)
        change = (values - grid.dequantize(grid.quantize(values))).unflatten(1, (groups, group_size)).transpose(0, 1)
        errors = (change @ blocks).mul_(change).sum(-1).T
        better = errors < best
        best = torch.where(better, errors, best)
        shrink[better] = share
    return Grid.of(values, bits, group_size, symmetric, shrink)
