"""Reader of linear layers of AMD's Quark, in fp8 or MXFP4.

fp8: ``weight`` [out, in] e4m3 and ``weight_scale``, by which it is multiplied: a number for the whole weight, or one
for each output, [out]. MXFP4: ``weight`` [out, in / 2] uint8 and ``weight_scale`` [out, in / 32] uint8, see
:mod:`fastinfer.formats.mxfp4`. Layers of other dtypes are not quantised; a checkpoint may have layers of all kinds.
Inputs are not rounded, whatever the settings say of them. The layout is that of Quark's safetensors export
(https://quark.docs.amd.com).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fastinfer.errors import UnsupportedModelError
from fastinfer.formats.fp8 import E4M3, read_fp8
from fastinfer.formats.linear_tensors import LinearTensors
from fastinfer.formats.mxfp4 import MX_GROUP, read_mxfp4
from fastinfer.formats.quantization_settings import one_of, setting
from fastinfer.formats.unpacked import Dense, Int8, Lut


@dataclass(frozen=True)
class QuarkFormat:
    """Format of a checkpoint's layers; each layer's follows from its tensors."""

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> "QuarkFormat":
        """Parse a ``quantization_config``.

        Raises:
            UnsupportedModelError: a setting is not implemented.
            CheckpointFormatError: a setting is missing or of the wrong type.
        """
        export = setting(config, "export", dict, {})
        one_of(export, "weight_format", ("real_quantized",), "real_quantized")
        for algorithm in setting(config, "algo_config", list, []):
            if "rotation" in str(algorithm.get("name") if isinstance(algorithm, dict) else algorithm).lower():
                raise UnsupportedModelError("quantization_config: 'algo_config': rotations are not implemented")
        _check_weight(setting(config, "global_quant_config", dict))
        for key in ("layer_quant_config", "layer_type_quant_config"):
            layers = setting(config, key, dict, {})
            for name in layers:
                _check_weight(setting(layers, name, dict, {}))
        return cls()

    def read(self, layer: LinearTensors, exact: bool = True) -> Int8 | Lut | Dense:
        """Read a layer's weight; all is as in :meth:`fastinfer.formats.fp8.FP8Format.read`, MXFP4 becomes a Lut."""
        weight = layer.get("weight")
        if weight is not None and weight.dtype == E4M3:
            return read_fp8(layer, "weight_scale", None, exact)
        if weight is not None and weight.dtype == torch.uint8:
            return read_mxfp4(layer, "weight", "weight_scale")
        return layer.dense()


def _check_weight(config: Mapping[str, Any]) -> None:
    """Require fp8 or MXFP4, given the settings of some layers; errors are those of :meth:`QuarkFormat.parse`."""
    weight = setting(config, "weight", dict, None)
    if weight is None:
        return
    if one_of(weight, "dtype", ("fp8_e4m3", "fp4")) == "fp8_e4m3":
        one_of(weight, "qscheme", ("per_tensor", "per_channel"))
    else:
        one_of(weight, "qscheme", ("per_group",))
        one_of(weight, "group_size", (MX_GROUP,))
        one_of(weight, "scale_format", ("e8m0",))
