"""Reader of linear layers and embeddings that MLX has quantised.

``weight`` [out, in * bits / 32] uint32 has the numbers of a row one after another from the lowest bits up. In the mode
``affine`` they are integers, and ``w = scales * q + biases`` for each group of inputs; ``scales`` and ``biases`` are
[out, groups]. In the modes ``mxfp4``, ``mxfp8`` and ``nvfp4`` the numbers are in fp4 or fp8, and ``scales`` are uint8:
see :mod:`fastinfer.formats.mxfp4`, :mod:`fastinfer.formats.mxfp8` and :mod:`fastinfer.formats.nvfp4`. Layers without
``scales`` are not quantised. The key ``quantization`` of config.json has the settings, and under a layer's name those
of single layers. https://ml-explore.github.io/mlx/build/html/python/_autosummary/mlx.core.quantize.html.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fastinfer.formats.fp8 import E4M3
from fastinfer.formats.linear_tensors import DENSE_DTYPES, KERNEL_GROUP, LinearTensors
from fastinfer.formats.mxfp4 import MX_GROUP, unpack_mxfp4
from fastinfer.formats.mxfp8 import unpack_mxfp8
from fastinfer.formats.nvfp4 import NVFP4_GROUP, unpack_nvfp4
from fastinfer.formats.packed_integers import unpack_integers
from fastinfer.formats.quantization_settings import one_of
from fastinfer.formats.unpacked import Dense, Int4, Int8, Lut
from fastinfer.formats.zero_points import INT8_ZERO, kernel_scales

# The bits and the group sizes of each mode; the first ones are MLX's defaults.
MODES = {
    "affine": ((4, 2, 3, 5, 6, 8), (64, 32, 128)),
    "mxfp4": ((4,), (MX_GROUP,)),
    "mxfp8": ((8,), (MX_GROUP,)),
    "nvfp4": ((4,), (NVFP4_GROUP,)),
}


class MLXSettings(NamedTuple):
    """How a layer is quantised.

    Attributes:
        mode: one of ``MODES``.
        bits: bits of a number.
        group_size: number of inputs per scale.
    """

    mode: str
    bits: int
    group_size: int

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> "MLXSettings":
        """Parse the settings of all layers or of one; errors are those of :meth:`MLXFormat.parse`."""
        mode = one_of(config, "mode", tuple(MODES), "affine")
        bits, sizes = MODES[mode]
        return cls(mode, one_of(config, "bits", bits, bits[0]), one_of(config, "group_size", sizes, sizes[0]))


@dataclass(frozen=True)
class MLXFormat:
    """Format of a checkpoint's layers.

    Attributes:
        settings: those of all layers but some.
        layers: those of single layers, by name.
    """

    settings: MLXSettings
    layers: Mapping[str, MLXSettings]

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> "MLXFormat":
        """Parse ``quantization``.

        Raises:
            UnsupportedModelError: a setting is not implemented.
            CheckpointFormatError: a setting is of the wrong type.
        """
        layers = {name: MLXSettings.parse(own) for name, own in config.items() if isinstance(own, dict)}
        return cls(MLXSettings.parse(config), layers)

    def read(self, layer: LinearTensors, exact: bool = True) -> Int4 | Int8 | Lut | Dense:
        """Read a layer's weight: Dense for a layer that is not quantised.

        In the mode ``affine`` it is Int4 for up to 4 bits and Int8 for more. The others are as their modules say.

        Args:
            layer: tensors of the layer.
            exact: see :func:`fastinfer.formats.zero_points.with_zero_points` and
                :meth:`fastinfer.formats.fp8.FP8Format.read`.

        Raises:
            CheckpointFormatError: a tensor is missing, does not have the shape and type of its format, or has numbers
                that are not finite.
            UnsupportedModelError: the kernels do not support the number of inputs.
        """
        if layer.has("weight") and not layer.has("scales"):
            return layer.dense()
        mode, bits, group_size = self.layers.get(layer.module, self.settings)
        if mode == "affine":
            return _read_affine(layer, bits, group_size, exact)
        rows, groups = layer.take("scales", torch.uint8, (None, None)).shape
        numbers = layer.take("weight", torch.uint32, (rows, groups * group_size * bits // 32)).view(torch.uint8)
        if mode == "mxfp4":
            return unpack_mxfp4(layer, numbers, "scales")
        if mode == "mxfp8":
            return unpack_mxfp8(layer, numbers.view(E4M3), "scales", exact)
        layer.group_size(KERNEL_GROUP, 2 * numbers.shape[1])
        scales = layer.take("scales", torch.uint8, (rows, groups)).view(E4M3).float()
        if not scales.isfinite().all():
            layer.fail("scales", "expected finite numbers")
        return unpack_nvfp4(numbers, scales, exact)


def _read_affine(layer: LinearTensors, bits: int, group_size: int, exact: bool) -> Int4 | Int8:
    scales = layer.take("scales", DENSE_DTYPES, (None, None))
    rows, groups = scales.shape
    mins = layer.take("biases", DENSE_DTYPES, (rows, groups))
    words = layer.take("weight", torch.uint32, (rows, groups * group_size * bits // 32)).view(torch.int32)
    q = unpack_integers(words, bits)
    if bits <= 4:
        return Int4(q, *kernel_scales(scales, mins, exact))
    if bits == 8:
        q, mins = q ^ INT8_ZERO, mins.float() + INT8_ZERO * scales.float()
    return Int8(q.view(torch.int8), *kernel_scales(scales, mins, exact))
