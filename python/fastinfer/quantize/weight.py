"""Quantisation of one weight by a method, from the statistics of its inputs."""

from dataclasses import replace

import torch
from torch import Tensor

from fastinfer.errors import QuantizationError
from fastinfer.formats.unpacked import Grouped, Unpacked
from fastinfer.quantize.awq import search_clipping, search_scales
from fastinfer.quantize.calibration import CalibratedWeight
from fastinfer.quantize.gptq import quantize_gptq
from fastinfer.quantize.methods import NF4_GROUP, Method
from fastinfer.quantize.rounding import round_rows, round_to_nearest, round_to_nf4
from fastinfer.quantize.smoothquant import smoothing_scales
from fastinfer.quantize.statistics import InputStatistics


def quantize_weight(
    method: Method, weight: CalibratedWeight, statistics: InputStatistics | None, can_fold: bool
) -> None:
    """Set the weight's ``result``, and its ``input_scales`` if the method scales inputs.

    Args:
        method: the method and its numbers.
        weight: the weight to quantise.
        statistics: statistics of its inputs; ``None`` for a method that needs none, or for an expert that no token
            of the calibration text has chosen, which is rounded to nearest.
        can_fold: whether the module before it can absorb a factor per input.

    Raises:
        QuantizationError: the weight or its inputs have numbers that are not finite, or scales that fp16 cannot hold.
    """
    values = weight.values
    for what, numbers in (("weights", values), ("inputs", None if statistics is None else statistics.max_abs)):
        if numbers is not None and not bool((finite := numbers.isfinite()).all()):
            raise QuantizationError(f"expected finite {what}, got {float(numbers[~finite][0])}")
    if statistics is None or not method.needs_inputs:
        weight.result = round_rows(values) if method.name == "w8a8" else _rounded(method, values)
        return
    grid = method.bits, _group_size(method, values), method.symmetric
    if method.name == "gptq":
        weight.result = quantize_gptq(values, statistics, *grid[:2], symmetric=method.symmetric)
    elif method.name == "awq":
        if can_fold:
            weight.input_scales = search_scales(values, statistics, *grid)
            values, statistics = values * weight.input_scales, statistics.scaled(weight.input_scales)
        clipped = search_clipping(values, statistics, *grid)
        weight.result = clipped.unpacked(clipped.quantize(values))
    else:
        if can_fold:
            weight.input_scales = smoothing_scales(values, statistics)
            values = values * weight.input_scales
        weight.result = round_rows(values)


def _rounded(method: Method, values: Tensor) -> Unpacked:
    """Quantise a weight by a method that needs no inputs."""
    if method.name == "nf4":
        return round_to_nf4(values, NF4_GROUP)
    if method.name == "int8":
        return round_to_nearest(values, 8, values.shape[1], method.symmetric)
    return round_to_nearest(values, method.bits, _group_size(method, values), method.symmetric)


def _group_size(method: Method, values: Tensor) -> int:
    return method.group_size if method.group_size != -1 else values.shape[1]


def fold_into_rows(weight: Unpacked, scales: Tensor) -> Unpacked:
    """Divide a weight's outputs by ``scales`` [out_features], which changes only its scales and minimums.

    Scales stay numbers that fp16 holds, and zero points stay integers, so that files can store them.
    """
    assert isinstance(weight, Grouped)
    divided = weight.scales.float() / scales[:, None]
    if weight.scales.dtype == torch.float32 and weight.mins is None:
        return replace(weight, scales=divided)
    rounded = divided.half().float()
    mins = None if weight.mins is None else weight.mins * (rounded / weight.scales.float())
    return replace(weight, scales=rounded.to(weight.scales.dtype), mins=mins)
