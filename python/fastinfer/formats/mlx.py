"""Reader of linear layers and embeddings that MLX has quantised (mode ``affine``).

``w = scales * q + biases`` for each group of inputs. ``weight`` [out, in * bits / 32] uint32 has the integers of a row
one after another from the lowest bits up; ``scales`` and ``biases`` are [out, groups]. Layers without ``scales`` are
not quantised. The key ``quantization`` of config.json has the bits and the group size, and under a layer's name those
of single layers. https://ml-explore.github.io/mlx/build/html/python/_autosummary/mlx.core.quantize.html.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fastinfer.formats.linear_tensors import DENSE_DTYPES, LinearTensors
from fastinfer.formats.packed_integers import unpack_integers
from fastinfer.formats.quantization_settings import one_of
from fastinfer.formats.unpacked import Dense, Int4, Int8
from fastinfer.formats.zero_points import INT8_ZERO, kernel_scales

GROUP_SIZES = 64, 32, 128
BITS = 4, 2, 3, 5, 6, 8


@dataclass(frozen=True)
class MLXFormat:
    """Format of a checkpoint's layers.

    Attributes:
        bits: 2, 3, 4, 5, 6 or 8.
        group_size: number of inputs per scale: 32, 64 or 128.
        layers: bits and group size of single layers, by name.
    """

    bits: int
    group_size: int
    layers: Mapping[str, tuple[int, int]]

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> "MLXFormat":
        """Parse ``quantization``.

        Raises:
            UnsupportedModelError: a setting is not implemented.
            CheckpointFormatError: a setting is missing or of the wrong type.
        """
        layers = {name: _sizes(own) for name, own in config.items() if isinstance(own, dict)}
        return cls(*_sizes(config), layers)

    def read(self, layer: LinearTensors, exact: bool = True) -> Int4 | Int8 | Dense:
        """Read a layer's weight: Int4 for up to 4 bits, Int8 for more, Dense for a layer that is not quantised.

        Args:
            layer: tensors of the layer.
            exact: see :func:`fastinfer.formats.zero_points.with_zero_points`.

        Raises:
            CheckpointFormatError: a tensor is missing or does not have the shape and type of its format.
        """
        if layer.has("weight") and not layer.has("scales"):
            return layer.dense()
        bits, group_size = self.layers.get(layer.module, (self.bits, self.group_size))
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


def _sizes(config: Mapping[str, Any]) -> tuple[int, int]:
    """Read bits and group size of all layers or of one."""
    one_of(config, "mode", ("affine",), "affine")
    return one_of(config, "bits", BITS), one_of(config, "group_size", GROUP_SIZES)
