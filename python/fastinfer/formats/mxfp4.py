"""Weights in MXFP4: fp4 (e2m1), with an exponent of a power of two (e8m0) for each group of 32 inputs.

A weight becomes a look-up table of twice the numbers of e2m1, which are integers, with scales of half a power of two.
Nothing is rounded: scales are fp16, or fp32 if an exponent of the layer is beyond the range of fp16.
https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf.

The method ``mxfp4`` (GPT-OSS) quantises the experts alone, and stores all of a layer's in one pair of tensors:
``blocks`` [experts, out, in / 32, 16], two numbers to a byte, the first in its lower half, and ``scales``
[experts, out, in / 32], the exponents plus 127.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastinfer.formats.linear_tensors import LinearTensors
from fastinfer.formats.nvfp4 import HALVES
from fastinfer.formats.packed_integers import unpack_integers
from fastinfer.formats.unpacked import Dense, Lut

MX_GROUP = 32
MXFP4_TABLE = torch.from_numpy(HALVES).float()
# Exponents whose scales are numbers of fp16, from its smallest subnormal number to its largest power of two.
FP16_EXPONENTS = range(104, 144)
NAN = 255
# Half the power of two of each exponent. That of the smallest is a subnormal number of fp32.
SCALES = torch.from_numpy(np.ldexp(np.float32(1), np.arange(NAN) - 128))


@dataclass(frozen=True)
class MXFP4Format:
    """Format of a checkpoint's layers: those that are no experts are not quantised."""

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> "MXFP4Format":
        """Parse a ``quantization_config``. Which layers are quantised follows from their tensors."""
        return cls()

    def read(self, layer: LinearTensors, exact: bool = True) -> Dense:
        """Read the weight of a layer that is not quantised.

        Raises:
            CheckpointFormatError: the weight is missing, or does not have the shape and type of its format.
        """
        return layer.dense()


@dataclass(frozen=True, eq=False)
class MXFP4Experts:
    """A projection of all experts of a layer.

    Attributes:
        blocks: [experts, out, in / 32, 16] uint8.
        scales: [experts, out, in / 32] fp16 or fp32.
    """

    blocks: Tensor
    scales: Tensor

    @classmethod
    def read(cls, layer: LinearTensors, name: str) -> "MXFP4Experts":
        """Read ``name_blocks`` and ``name_scales``.

        Raises:
            CheckpointFormatError: a tensor is missing, does not have the shape and type of the format, or has an
                exponent that stands for NaN.
        """
        blocks = layer.take(f"{name}_blocks", torch.uint8, (None, None, None, 16))
        return cls(blocks, _scales(read_exponents(layer, f"{name}_scales", tuple(blocks.shape[:-1]))))

    def expert(self, index: int, rows: slice) -> Lut:
        """Unpack rows of the weight of one expert, [rows, in]."""
        return Lut(unpack_integers(self.blocks[index, rows], 4), self.scales[index, rows], table=MXFP4_TABLE)


def read_mxfp4(layer: LinearTensors, weight_name: str, scale_name: str) -> Lut:
    """Read a weight of its own, [out, in / 2] uint8, and its exponents plus 127, [out, in / 32] uint8.

    Raises:
        CheckpointFormatError: as for :meth:`MXFP4Experts.read`.
        UnsupportedModelError: the kernels do not support the number of inputs.
    """
    return unpack_mxfp4(layer, layer.take(weight_name, torch.uint8, (None, None)), scale_name)


def unpack_mxfp4(layer: LinearTensors, packed: Tensor, scale_name: str) -> Lut:
    """Unpack the numbers of a weight, [out, in / 2] uint8; all else is as for :func:`read_mxfp4`."""
    rows, columns = packed.shape[0], 2 * packed.shape[1]
    layer.group_size(MX_GROUP, columns)
    exponents = read_exponents(layer, scale_name, (rows, columns // MX_GROUP))
    return Lut(unpack_integers(packed, 4), _scales(exponents), table=MXFP4_TABLE)


def read_exponents(layer: LinearTensors, name: str, shape: tuple[int, ...]) -> Tensor:
    """Read exponents of powers of two plus 127 (e8m0), uint8.

    Raises:
        CheckpointFormatError: as for :meth:`MXFP4Experts.read`.
    """
    exponents = layer.take(name, torch.uint8, shape)
    if int(exponents.max()) == NAN:
        layer.fail(name, f"expected exponents below {NAN}, which stands for NaN")
    return exponents


def _scales(exponents: Tensor) -> Tensor:
    """Return the scales of exponents, in fp16 if all of them fit."""
    smallest, largest = (int(number) for number in exponents.aminmax())
    fits = smallest in FP16_EXPONENTS and largest in FP16_EXPONENTS
    scales = SCALES.half() if fits else SCALES
    return torch.from_numpy(scales.numpy()[exponents.numpy()])
