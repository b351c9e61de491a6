"""Reader of linear layers of a Hugging Face checkpoint, for all supported quantisation methods."""

from collections.abc import Callable, Mapping
from typing import Any

from fastinfer.errors import UnsupportedModelError
from fastinfer.formats.auto_round import AutoRoundFormat
from fastinfer.formats.awq import AWQFormat
from fastinfer.formats.bitsandbytes import BitsAndBytesFormat
from fastinfer.formats.compressed_tensors import CompressedTensorsFormat
from fastinfer.formats.fp8 import FP8Format
from fastinfer.formats.gptq import GPTQFormat
from fastinfer.formats.linear_tensors import LinearTensors, Tensors
from fastinfer.formats.mlx import MLXFormat
from fastinfer.formats.modelopt import ModelOptFormat
from fastinfer.formats.mxfp4 import MXFP4Format
from fastinfer.formats.quantization_settings import setting
from fastinfer.formats.quark import QuarkFormat
from fastinfer.formats.unpacked import Unpacked

CheckpointFormat = (
    GPTQFormat
    | AWQFormat
    | AutoRoundFormat
    | BitsAndBytesFormat
    | CompressedTensorsFormat
    | FP8Format
    | MLXFormat
    | ModelOptFormat
    | MXFP4Format
    | QuarkFormat
)

# The parsers of the methods' settings.
FORMATS: dict[str, Callable[[Mapping[str, Any]], CheckpointFormat]] = {
    "gptq": GPTQFormat.parse,
    "awq": AWQFormat.parse,
    "auto-round": AutoRoundFormat.parse,
    "bitsandbytes": BitsAndBytesFormat.parse,
    "compressed-tensors": CompressedTensorsFormat.parse,
    "fp8": FP8Format.parse,
    "fbgemm_fp8": FP8Format.parse,
    "modelopt": ModelOptFormat.parse,
    "mxfp4": MXFP4Format.parse,
    "mlx": MLXFormat.parse,
    "quark": QuarkFormat.parse,
}

# How many times as wide the kernels' integers are as the file's, by the file's bits.
WIDENED: dict[int, float] = {2: 4 / 2, 3: 4 / 3, 5: 8 / 5, 6: 8 / 6}


def parse_quantization_config(config: Mapping[str, Any] | None) -> CheckpointFormat | None:
    """Parse the ``quantization_config`` of config.json; ``None`` stands for a checkpoint that is not quantised.

    Raises:
        UnsupportedModelError: the method or one of its settings is not implemented; the message names it.
        CheckpointFormatError: a setting is missing or of the wrong type.
    """
    if config is None:
        return None
    method = _method(config)
    if method not in FORMATS:
        supported = ", ".join(FORMATS)
        raise UnsupportedModelError(
            f"quantization_config: quant_method {method!r} is not implemented; supported: {supported}"
        )
    return FORMATS[method](config)


def _method(config: Mapping[str, Any]) -> str:
    """Return the name of the method; Model Optimizer has not always written it."""
    return setting(config, "quant_method", str, *(("modelopt",) if "quant_algo" in config else ()))


def read_linear(
    tensors: Tensors, module: str, quantization_config: Mapping[str, Any] | None, *, exact: bool = True
) -> Unpacked:
    """Read the weight of a linear layer.

    Args:
        tensors: tensors of the checkpoint, in host memory.
        module: name of the layer; its tensors are ``module.weight``, ``module.qweight`` and so on.
        quantization_config: the setting of config.json; ``None`` for a checkpoint that is not quantised.
        exact: whether to keep all numbers unrounded. Otherwise products of scales and zeros may be rounded to fp16,
            which makes the kernels faster; see :func:`fastinfer.formats.zero_points.with_zero_points`.

    Raises:
        UnsupportedModelError: the method, one of its settings or the group size is not supported.
        CheckpointFormatError: a setting or tensor is missing, or a tensor does not have the shape and type of the
            format.
    """
    return read_with(parse_quantization_config(quantization_config), tensors, module, exact=exact)


def read_with(format: CheckpointFormat | None, tensors: Tensors, module: str, *, exact: bool = True) -> Unpacked:
    """Read the weight of a linear layer in a parsed format; all else is as for :func:`read_linear`."""
    layer = LinearTensors(tensors, module)
    return layer.dense() if format is None else format.read(layer, exact)


class PackedSizes:
    """Estimates of the sizes in memory of a checkpoint's tensors.

    They differ from the sizes in the file where the kernels' integers are wider than the file's numbers.

    Args:
        config, exact: see :func:`read_linear`.
    """

    def __init__(self, config: Mapping[str, Any] | None, exact: bool) -> None:
        config = config or {}
        # Int8 with an fp16 scale per 32 inputs, or fp32.
        self._float_bits = 32 if exact else 8.5
        self._is_nvfp4 = "quant_algo" in config or "nvfp4-pack-quantized" in str(config)
        bits = config.get("bits")
        self._widened = WIDENED.get(bits, 1.0) if type(bits) is int else 1.0
        # MLX quantises the embedding, too. Single rows of MXFP4 are looked up as int8.
        mode = config.get("mode")
        if mode in ("mxfp8", "nvfp4"):
            self._widened = self._float_bits / (8 if mode == "mxfp8" else 4)
        self._looked_up = 2.0 if mode == "mxfp4" else 1.0

    def num_bytes(self, name: str, stored: int, dtype: str, *, is_looked_up: bool = False) -> int:
        """Return the size of a tensor.

        Args:
            name: its name in the file.
            stored: its size in the file in bytes.
            dtype: its dtype, by the name in safetensors files.
            is_looked_up: whether single rows of it are read, as of the embedding.
        """
        part = name.rpartition(".")[2]
        factor = 1.0
        if dtype == "F8_E4M3" and part == "weight":
            factor = self._float_bits / 8
        elif dtype == "U8" and part in ("weight", "weight_packed") and self._is_nvfp4:
            factor = self._float_bits / 4
        elif part == "qweight" or dtype == "U32":
            factor = self._widened * (self._looked_up if is_looked_up else 1.0)
        return round(stored * factor)
