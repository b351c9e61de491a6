"""Reader of linear layers as transformers saves those that bitsandbytes has quantised.

4 bits: ``weight`` holds two places of the table ``weight.quant_map`` per byte, the first in the upper half, in the
weight's own order; every run of ``blocksize`` values has a scale in ``weight.absmax``. With double quantisation these
are bytes themselves: places of ``weight.nested_quant_map``, scaled by ``weight.nested_absmax`` per run of
``nested_blocksize``, plus an offset. ``weight.quant_state.bitsandbytes__nf4`` (or ``fp4``) holds the numbers as JSON.
Dettmers et al., 2023, https://arxiv.org/abs/2305.14314.

8 bits: ``w = weight * SCB / 127``, a scale per row. Dettmers et al., 2022, https://arxiv.org/abs/2208.07339.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastinfer.errors import CheckpointFormatError, UnsupportedModelError
from fastinfer.formats.linear_tensors import DENSE_DTYPES, LinearTensors
from fastinfer.formats.quantization_settings import setting
from fastinfer.formats.unpacked import Dense, Int8, Lut
from fastinfer.formats.zero_points import kernel_scales

STATE = "weight.quant_state.bitsandbytes__"


@dataclass(frozen=True)
class BitsAndBytesFormat:
    """How a checkpoint's layers are stored.

    Attributes:
        bits: 4 or 8.
    """

    bits: int

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> "BitsAndBytesFormat":
        """From a ``quantization_config``; how 4 bits are stored says each layer's own state.

        Raises:
            UnsupportedModelError: neither or both of ``load_in_4bit`` and ``load_in_8bit`` are set.
            CheckpointFormatError: one of them is of the wrong type.
        """
        four, eight = (setting(config, f"load_in_{bits}bit", bool, False) for bits in (4, 8))
        if four == eight:
            raise UnsupportedModelError("quantization_config: expected load_in_4bit or load_in_8bit")
        return cls(4 if four else 8)

    def read(self, layer: LinearTensors, exact: bool = True) -> Lut | Int8 | Dense:
        """A layer's weight: Lut, Int8, or Dense for a layer that was left out.

        Args:
            layer: its tensors.
            exact: fp32 scales; otherwise a table's are fp16, see :func:`fastinfer.formats.zero_points.kernel_scales`.

        Raises:
            CheckpointFormatError: a tensor is missing or has another shape or type than its format says.
            UnsupportedModelError: the kernels have no such groups.
        """
        weight = layer.get("weight")
        if weight is not None and weight.dtype in DENSE_DTYPES and not layer.has("weight.absmax"):
            return layer.dense()
        return _read_int8(layer) if self.bits == 8 else _read_table(layer, exact)


def _read_int8(layer: LinearTensors) -> Int8:
    weight = layer.take("weight", torch.int8, (None, None))
    scales = layer.take("SCB", torch.float32, (weight.shape[0],))
    order = layer.get("weight_format")
    if order is not None and order.numel() == 1 and order.item() != 0:
        raise UnsupportedModelError(
            f"layer '{layer.module}': weight_format {order.item()} is not implemented; expected 0"
        )
    layer.group_size(-1, weight.shape[1])
    return Int8(weight, (scales / 127)[:, None])


def _read_table(layer: LinearTensors, exact: bool) -> Lut:
    kind = "fp4" if layer.has(STATE + "fp4") else "nf4"
    state = _State.parse(layer, STATE + kind)
    rows, columns = state.shape
    layer.group_size(state.block_size, columns)
    weight = layer.get("weight")
    if weight is None or weight.nbytes != rows * columns // 2:
        got = "nothing" if weight is None else f"{weight.nbytes}"
        layer.fail("weight", f"expected {rows * columns // 2} bytes for {rows} x {columns} values, got {got}")
    packed = weight.contiguous().view(torch.uint8).view(rows, columns // 2)
    blocks = rows * columns // state.block_size
    table = layer.take("weight.quant_map", torch.float32, (16,))
    if state.nested is None:
        scales = layer.take("weight.absmax", torch.float32, (blocks,))
    else:
        scales = _nested_scales(layer, blocks, *state.nested)
    scales, _ = kernel_scales(scales.view(rows, -1), exact=exact)
    return Lut(_nibbles(packed), scales, table=table)


def _nested_scales(layer: LinearTensors, blocks: int, block_size: int, offset: float) -> Tensor:
    places = layer.take("weight.absmax", torch.uint8, (blocks,)).long()
    table = layer.take("weight.nested_quant_map", torch.float32, (256,))
    scales = layer.take("weight.nested_absmax", torch.float32, (-(-blocks // block_size),))
    return table[places] * scales.repeat_interleave(block_size)[:blocks] + offset


def _nibbles(packed: Tensor) -> Tensor:
    """[rows, n] bytes as [rows, 2n] values, the upper halves first."""
    values = packed.numpy().astype(np.uint16)
    values = (values >> 4 | values << 8) & np.uint16(0x0F0F)
    return torch.from_numpy(values.view(np.uint8))


@dataclass(frozen=True)
class _State:
    """A layer's numbers that are no tensors; ``nested``: block size and offset of the scales' own quantisation."""

    shape: tuple[int, int]
    block_size: int
    nested: tuple[int, float] | None

    @classmethod
    def parse(cls, layer: LinearTensors, part: str) -> "_State":
        text = layer.take(part, torch.uint8, (None,))
        try:
            values = json.loads(bytes(text.numpy()))
        except (ValueError, RecursionError) as error:
            raise CheckpointFormatError(f"tensor '{layer.module}.{part}': expected JSON ({error})") from None
        if not isinstance(values, dict):
            layer.fail(part, "expected a JSON object")
        shape, block_size = values.get("shape"), values.get("blocksize")
        if not isinstance(shape, list) or len(shape) != 2 or not all(type(size) is int and size > 0 for size in shape):
            layer.fail(part, f"expected a shape of two sizes, got {shape!r:.90}")
        if type(block_size) is not int or block_size <= 0:
            layer.fail(part, f"expected a blocksize, got {block_size!r:.90}")
        if "nested_offset" not in values:
            return cls((shape[0], shape[1]), block_size, None)
        nested_size, offset = values.get("nested_blocksize"), values["nested_offset"]
        if type(nested_size) is not int or nested_size <= 0 or type(offset) is not float or not math.isfinite(offset):
            layer.fail(part, f"expected nested_blocksize and nested_offset, got {nested_size!r:.90} and {offset!r:.90}")
        return cls((shape[0], shape[1]), block_size, (nested_size, offset))
