"""Reader of linear layers of NVIDIA's Model Optimizer, in fp8, MXFP8 or NVFP4.

fp8: ``weight`` [out, in] e4m3 and ``weight_scale``, a number by which it is multiplied. MXFP8: the same with
``weight_scale`` [out, in / 32] uint8, see :mod:`fastinfer.formats.mxfp8`. NVFP4: ``weight`` [out, in / 2] uint8,
``weight_scale`` [out, in / 16] e4m3 and ``weight_scale_2``, a number by which the scales are multiplied. Layers of
other dtypes are not quantised; a checkpoint may have layers of all kinds. ``input_scale`` is not read, because inputs
are not rounded. The layout is that of ``modelopt.torch.export`` (https://github.com/NVIDIA/TensorRT-Model-Optimizer).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fastinfer.errors import UnsupportedModelError
from fastinfer.formats.fp8 import E4M3, read_fp8
from fastinfer.formats.linear_tensors import LinearTensors
from fastinfer.formats.mxfp8 import read_mxfp8
from fastinfer.formats.nvfp4 import read_nvfp4
from fastinfer.formats.quantization_settings import one_of
from fastinfer.formats.unpacked import Dense, Int8

ALGORITHMS = ("fp8", "mxfp8", "nvfp4", "w4a16_nvfp4", "mixed_precision")


@dataclass(frozen=True)
class ModelOptFormat:
    """Format of a checkpoint's layers; each layer's follows from its tensors."""

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> "ModelOptFormat":
        """Parse a ``quantization_config``.

        Raises:
            UnsupportedModelError: the algorithm is not implemented.
            CheckpointFormatError: its name is missing or is not a string.
        """
        one_of(config, "quant_algo", ALGORITHMS)
        return cls()

    def read(self, layer: LinearTensors, exact: bool = True) -> Int8 | Dense:
        """Read a layer's weight; all is as in :meth:`fastinfer.formats.fp8.FP8Format.read`."""
        weight = layer.get("weight")
        if layer.has("pre_quant_scale"):
            raise UnsupportedModelError(f"layer '{layer.module}': 'pre_quant_scale' (AWQ) is not implemented")
        if weight is not None and weight.dtype == E4M3:
            scales = layer.get("weight_scale")
            if scales is not None and scales.dtype == torch.uint8:
                return read_mxfp8(layer, exact)
            return read_fp8(layer, "weight_scale", None, exact)
        if weight is not None and weight.dtype == torch.uint8:
            return read_nvfp4(layer, "weight", layer.take_number("weight_scale_2", torch.float32), exact)
        return layer.dense()
