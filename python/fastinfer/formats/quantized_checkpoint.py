"""Reader of linear layers of a Hugging Face checkpoint, for all supported quantisation methods."""

from collections.abc import Mapping
from typing import Any

from fastinfer.errors import UnsupportedModelError
from fastinfer.formats.awq import AWQFormat
from fastinfer.formats.bitsandbytes import BitsAndBytesFormat
from fastinfer.formats.compressed_tensors import CompressedTensorsFormat
from fastinfer.formats.gptq import GPTQFormat
from fastinfer.formats.linear_tensors import LinearTensors, Tensors
from fastinfer.formats.quantization_settings import setting
from fastinfer.formats.unpacked import Unpacked

CheckpointFormat = GPTQFormat | AWQFormat | BitsAndBytesFormat | CompressedTensorsFormat

FORMATS: dict[str, type[CheckpointFormat]] = {
    "gptq": GPTQFormat,
    "awq": AWQFormat,
    "bitsandbytes": BitsAndBytesFormat,
    "compressed-tensors": CompressedTensorsFormat,
}


def parse_quantization_config(config: Mapping[str, Any] | None) -> CheckpointFormat | None:
    """Parse the ``quantization_config`` of config.json; ``None`` stands for a checkpoint that is not quantised.

    Raises:
        UnsupportedModelError: the method or one of its settings is not implemented; the message names it.
        CheckpointFormatError: a setting is missing or of the wrong type.
    """
    if config is None:
        return None
    method = setting(config, "quant_method", str)
    if method not in FORMATS:
        supported = ", ".join(FORMATS)
        raise UnsupportedModelError(
            f"quantization_config: quant_method {method!r} is not implemented; supported: {supported}"
        )
    return FORMATS[method].parse(config)


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
    layer = LinearTensors(tensors, module)
    format = parse_quantization_config(quantization_config)
    return layer.dense() if format is None else format.read(layer, exact)
