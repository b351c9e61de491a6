"""Reader of bitsandbytes linear layers, as transformers saves them.

4 bits: ``weight`` has two indices into the look-up table ``weight.quant_map`` per byte, the first in the upper half, in
row-major order. Each block of ``blocksize`` values has a scale in ``weight.absmax``. With double quantisation these
scales are bytes, indices into ``weight.nested_quant_map``; the value is multiplied by ``weight.nested_absmax`` (one per
``nested_blocksize`` scales), and an offset is added. ``weight.quant_state.bitsandbytes__nf4`` (or ``fp4``) holds the
sizes and the offset as JSON. Dettmers et al., 2023, https://arxiv.org/abs/2305.14314.

8 bits: ``w = weight * SCB / 127``, with a scale per row. Dettmers et al., 2022, https://arxiv.org/abs/2208.07339.
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
    """Format of a checkpoint's layers.

    Attributes:
        bits: 4 or 8.
    """

    bits: int

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> "BitsAndBytesFormat":
        """Parse a ``quantization_config``; the details of 4-bit layers are in each layer's own state.

        Raises:
            UnsupportedModelError: neither or both of ``load_in_4bit`` and ``load_in_8bit`` are set.
            CheckpointFormatError: one of them has the wrong type.
        """
        four, eight = (setting(config, f"load_in_{bits}bit", bool, False) for bits in (4, 8))
        if four == eight:
            got = "both" if four else "neither"
            raise UnsupportedModelError(f"quantization_config: expected load_in_4bit or load_in_8bit, got {got}")
        return cls(4 if four else 8)

    def read(self, layer: LinearTensors, exact: bool = True) -> Lut | Int8 | Dense:
        """Read a layer's weight: Lut, Int8, or Dense for a layer that is not quantised.

        Args:
            layer: tensors of the layer.
            exact: whether to keep the scales of a Lut in fp32 if fp16 would round them, see
                :func:`fastinfer.formats.zero_points.kernel_scales`.

        Raises:
            CheckpointFormatError: a tensor is missing or does not have the shape and type of its format.
            UnsupportedModelError: the kernels do not support the group size.
        """
        weight = layer.get("weight")
        if weight is not None and weight.dtype in DENSE_DTYPES and not layer.has("weight.absmax"):
            return layer.dense()
        return _read_int8(layer) if self.bits == 8 else _read_lut(layer, exact)


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


def _read_lut(layer: LinearTensors, exact: bool) -> Lut:
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
    indices = layer.take("weight.absmax", torch.uint8, (blocks,)).long()
    table = layer.take("weight.nested_quant_map", torch.float32, (256,))
    scales = layer.take("weight.nested_absmax", torch.float32, (-(-blocks // block_size),))
    return table[indices] * scales.repeat_interleave(block_size)[:blocks] + offset


def _nibbles(packed: Tensor) -> Tensor:
    """Unpack [rows, n] bytes to [rows, 2n] 4-bit values, the upper half of each byte first."""
    values = packed.numpy().astype(np.uint16)
    values = (values >> 4 | values << 8) & np.uint16(0x0F0F)
    return torch.from_numpy(values.view(np.uint8))


@dataclass(frozen=True)
class _State:
    """Sizes of a 4-bit layer; ``nested`` has the block size and the offset of double quantisation, if it was used."""

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
