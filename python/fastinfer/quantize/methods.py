"""Quantisation methods by name: rules that turn a weight and the statistics of its inputs into a quantised weight."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fastinfer.errors import RequestError
from fastinfer.formats.unpacked import Grouped, Unpacked
from fastinfer.models.config import ModelConfig
from fastinfer.quantize.awq import search_clipping, search_scales
from fastinfer.quantize.calibration import CalibratedWeight
from fastinfer.quantize.gptq import quantize_gptq
from fastinfer.quantize.rounding import round_rows, round_to_nearest, round_to_nf4
from fastinfer.quantize.smoothquant import smoothing_scales
from fastinfer.quantize.statistics import InputStatistics

# Methods that use no zero points by default: 8 bits lose nothing without them, and more programs read the result.
SYMMETRIC = ("int8", "nf4", "w8a8")
# Numbers of bits that each method supports; the first is the default.
METHODS = {
    "rtn": (4, 2, 3, 8),
    "gptq": (4, 2, 3, 8),
    "awq": (4, 3, 8),
    "nf4": (4,),
    "int8": (8,),
    "w8a8": (8,),
}
NF4_GROUP = 64


@dataclass(frozen=True)
class Method:
    """A quantisation method and its numbers.

    Attributes:
        name: a key of ``METHODS``.
        bits: number of bits of a weight.
        group_size: number of inputs that share a scale, -1 for whole rows; ignored by ``int8`` and ``w8a8``, which have
            one scale per row.
        symmetric: whether there are no zero points; must be true for ``w8a8`` and ``nf4``.

    Raises:
        RequestError: the name is unknown, or the method does not support a number.
    """

    name: str
    bits: int
    group_size: int = 64
    symmetric: bool = False

    def __post_init__(self) -> None:
        if self.name not in METHODS:
            raise RequestError(f"method: expected one of {', '.join(METHODS)}, got {self.name!r}")
        if self.bits not in METHODS[self.name]:
            raise RequestError(f"bits: expected one of {METHODS[self.name]} for {self.name}, got {self.bits}")
        if self.group_size != -1 and (self.group_size < 32 or self.group_size % 32):
            raise RequestError(f"group_size: expected a multiple of 32, or -1 for whole rows, got {self.group_size}")
        if self.name in ("w8a8", "nf4") and not self.symmetric:
            raise RequestError(f"symmetric: expected true for {self.name}, got false")
        if self.name == "nf4" and self.group_size != NF4_GROUP:
            raise RequestError(f"group_size: expected {NF4_GROUP} for nf4, got {self.group_size}")

    @property
    def by_row(self) -> bool:
        """Whether each row has one scale, whatever the group size."""
        return self.name in ("int8", "w8a8")

    @property
    def needs_inputs(self) -> bool:
        """Whether a calibration text changes the result."""
        return self.name in ("gptq", "awq", "w8a8")

    def check(self, config: ModelConfig) -> None:
        """Check that the inputs of the model's layers can be divided into such groups.

        Raises:
            RequestError: the group size, or 32, does not divide a layer's number of inputs.
        """
        widths = {config.hidden_size, config.num_heads * config.head_dim, config.intermediate_size}
        if self.group_size != -1 and not self.by_row:
            for width in sorted(width for width in widths if width % self.group_size):
                raise RequestError(
                    f"group_size: expected a divisor of every layer's inputs, {self.group_size} does not divide {width}"
                )
        for width in sorted(width for width in widths if width % 32):
            raise RequestError(f"quantised layers must have a multiple of 32 inputs, got {width}")

    def quantize(self, weight: CalibratedWeight, statistics: InputStatistics, can_fold: bool) -> None:
        """Set the weight's ``result``, and its ``input_scales`` if the method scales inputs.

        Args:
            weight: the weight to quantise.
            statistics: statistics of its inputs.
            can_fold: whether the module before it can absorb a factor per input.
        """
        values = weight.values
        group_size = self.group_size if self.group_size != -1 else values.shape[1]
        grid = self.bits, group_size, self.symmetric
        if self.name == "gptq":
            weight.result = quantize_gptq(values, statistics, self.bits, group_size, symmetric=self.symmetric)
        elif self.name == "awq":
            if can_fold:
                weight.input_scales = search_scales(values, statistics, *grid)
                values, statistics = values * weight.input_scales, statistics.scaled(weight.input_scales)
            clipped = search_clipping(values, statistics, *grid)
            weight.result = clipped.unpacked(clipped.quantize(values))
        elif self.name == "w8a8":
            if can_fold:
                weight.input_scales = smoothing_scales(values, statistics)
                values = values * weight.input_scales
            weight.result = round_rows(values)
        elif self.name == "nf4":
            weight.result = round_to_nf4(values, NF4_GROUP)
        elif self.name == "int8":
            weight.result = round_to_nearest(values, 8, values.shape[1], self.symmetric)
        else:
            weight.result = round_to_nearest(values, *grid)


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
