"""Weights in fp8 (e4m3): the reader of the method ``fp8``, and what other methods with fp8 weights share.

No kernel reads fp8. A weight becomes int8 with a scale of max |w| / 127 for each group of 32 inputs, or dense fp32
where all numbers must stay unrounded. For normally distributed weights int8 adds a fifth of the format's own error
(root mean square). The two add in square, so the total grows by 2 %. Inputs are not rounded to fp8.

The method ``fp8`` (DeepSeek, Qwen, Mistral; transformers' FineGrainedFP8Config) stores ``weight`` [out, in] and
``weight_scale_inv`` (or ``weight_scale``), by which it is multiplied: a number for the whole weight, or one for each
block of ``weight_block_size``, [ceil(out / block), ceil(in / block)]. ``fbgemm_fp8`` (Llama 3.1 405B) has a number for
each output, [out, 1]. Layers of other dtypes are not quantised. https://arxiv.org/abs/2412.19437, section 3.3.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastinfer.errors import CheckpointFormatError
from fastinfer.formats.linear_tensors import DENSE_DTYPES, KERNEL_GROUP, LinearTensors
from fastinfer.formats.quantization_settings import one_of, setting
from fastinfer.formats.unpacked import Dense, Int8
from fastinfer.formats.zero_points import kernel_scales

E4M3 = torch.float8_e4m3fn
NAN = 0x7F  # without the sign
# Rows are converted in parts of about this many elements: the fp32 values of a whole matrix would take much memory.
PART = 2**20


@dataclass(frozen=True)
class FP8Format:
    """Format of a checkpoint's layers.

    Attributes:
        block: rows and columns of a block of weights with the same scale; ``None`` if a layer has one scale, or one for
            each output.
    """

    block: tuple[int, int] | None

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> "FP8Format":
        """Parse a ``quantization_config``. Which layers are quantised follows from their dtypes.

        Raises:
            UnsupportedModelError: a setting is not implemented.
            CheckpointFormatError: a setting is of the wrong type.
        """
        one_of(config, "fmt", ("e4m3", "float8_e4m3fn"), "e4m3")  # two names of the same type
        one_of(config, "scale_fmt", ("float", "ue8m0"), "float")  # powers of two, which are still stored as floats
        one_of(config, "expert_dtype", ("fp8",), "fp8")
        sizes = setting(config, "weight_block_size", list, None)
        return cls(None if sizes is None else block_shape(sizes, "weight_block_size"))

    def read(self, layer: LinearTensors, exact: bool = True) -> Int8 | Dense:
        """Read a layer's weight: Int8, or Dense if ``exact`` or if the layer is not quantised.

        Args:
            layer: tensors of the layer.
            exact: whether to keep all numbers unrounded, in fp32.

        Raises:
            CheckpointFormatError: a tensor is missing, does not have the shape and type of its format, or has numbers
                that are not finite.
            UnsupportedModelError: the kernels do not support the number of inputs.
        """
        weight = layer.get("weight")
        if weight is None or weight.dtype != E4M3:
            return layer.dense()
        name = "weight_scale" if layer.has("weight_scale") else "weight_scale_inv"
        return read_fp8(layer, name, self.block, exact)


def block_shape(sizes: list[Any], key: str) -> tuple[int, int]:
    """Return the shape of a block from a setting.

    Raises:
        CheckpointFormatError: it is not two positive integers.
    """
    if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise CheckpointFormatError(f"quantization_config: {key!r}: expected two positive integers, got {sizes!r:.90}")
    return sizes[0], sizes[1]


def read_fp8(layer: LinearTensors, scale_name: str, block: tuple[int, int] | None, exact: bool) -> Int8 | Dense:
    """Read ``weight`` in e4m3 and its scales; arguments and errors are those of :meth:`FP8Format.read`.

    Args:
        layer: see there.
        scale_name: name of the tensor of scales, by which the weight is multiplied.
        block: shape of a block with the same scale; ``None`` if all numbers have the same scale, or each row its own.
        exact: see there.
    """
    weight = layer.take("weight", E4M3, (None, None))
    rows, columns = weight.shape
    scales = layer.get(scale_name)
    if block is not None:
        block = min(block[0], rows), min(block[1], columns)
        scales = layer.take(scale_name, DENSE_DTYPES, (-(-rows // block[0]), -(-columns // block[1])))
    elif scales is not None and scales.shape in ((rows,), (rows, 1)):
        block, scales = (1, columns), layer.take(scale_name, DENSE_DTYPES, scales.shape).view(rows, 1)
    else:
        block, scales = (rows, columns), layer.take_number(scale_name, DENSE_DTYPES).view(1, 1)
    if not scales.isfinite().all():
        layer.fail(scale_name, "expected finite numbers")
    return unpack_fp8(layer, weight, scales.float(), block, exact)


def unpack_fp8(
    layer: LinearTensors, weight: Tensor, scales: Tensor, block: tuple[int, int], exact: bool
) -> Int8 | Dense:
    """Unpack a weight [out, in] e4m3, given the scales of its blocks in fp32; all else is as for :func:`read_fp8`."""
    rows, columns = weight.shape
    block_rows, block_columns = block
    of_row = torch.arange(rows) // block_rows

    def values(part: slice) -> Tensor:
        """Compute rows of the weight in fp32."""
        spread = scales[of_row[part]].repeat_interleave(block_columns, 1)[:, :columns]
        return decode_e4m3(weight[part]) * spread

    if bool(((weight.view(torch.uint8) & NAN) == NAN).any()):
        layer.fail("weight", "expected finite numbers")
    return Dense(values(slice(None))) if exact else _requantize(layer, values, rows, columns)


def decode_e4m3(weight: Tensor) -> Tensor:
    """Convert e4m3 to fp32; the numbers must be finite.

    A number's bits are those of an fp16 number that is 2^-8 times as large. This takes a third of the time of torch's
    conversion.
    """
    bits = weight.view(torch.int8).to(torch.int16)
    bits = (bits & -0x8000) | ((bits << 7) & 0x3F80)
    return bits.view(torch.float16).float().mul_(256)


def row_parts(rows: int, columns: int) -> list[slice]:
    """Divide a matrix into parts of whole rows, of about ``PART`` elements each."""
    step = max(1, PART // columns)
    return [slice(start, start + step) for start in range(0, rows, step)]


def _requantize(layer: LinearTensors, values: Callable[[slice], Tensor], rows: int, columns: int) -> Int8:
    """Round a weight to int8 in groups of 32 inputs; ``values`` computes a slice of its rows in fp32."""
    groups = columns // layer.group_size(KERNEL_GROUP, columns)
    parts = row_parts(rows, columns)
    largest = torch.cat([values(part).unflatten(1, (groups, -1)).abs().amax(-1) for part in parts])
    scales, _ = kernel_scales(largest / 127, exact=False)
    q = torch.empty(rows, columns, dtype=torch.int8)
    for part in parts:
        levels = values(part).unflatten(1, (groups, -1)) / scales[part].float()[..., None]
        # Groups of zeros have a scale of 0. Rounding of the scale may make the largest level a little more than 127.
        q[part] = levels.nan_to_num_(0.0).round_().clamp_(-127, 127).flatten(1).to(torch.int8)
    return Int8(q, scales)
