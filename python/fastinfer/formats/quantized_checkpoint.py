"""Linear layers of a Hugging Face checkpoint, whatever has quantised it."""

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
    """The format that a ``quantization_config`` of config.json describes; ``None`` if there is none.

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
    """A linear layer's weight.

    Args:
        tensors: of the checkpoint, in host memory.
        module: the layer's name; its tensors are ``module.weight``, ``module.qweight`` and so on.
        quantization_config: of config.json; ``None`` for a checkpoint that is not quantised.
        exact: no number is rounded. Otherwise products of scales and zeros may become fp16, which makes the kernels
            faster; see :func:`fastinfer.formats.zero_points.with_zero_points`.

    Raises:
        UnsupportedModelError: see :func:`parse_quantization_config`, or the kernels have no such groups.
        CheckpointFormatError: a tensor is missing or has another shape or type than the format says.
    """
    layer = LinearTensors(tensors, module)
    format = parse_quantization_config(quantization_config)
    return layer.dense() if format is None else format.read(layer, exact)
