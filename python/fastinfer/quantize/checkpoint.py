"""Quantises a folder of safetensors files into another one, layer by layer."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from fastinfer.errors import RequestError, UnsupportedModelError
from fastinfer.formats.safetensors_folder import weight_file_bytes
from fastinfer.formats.unpacked import concatenate
from fastinfer.models.hf_checkpoint import HFCheckpoint
from fastinfer.quantize.calibration import Calibrated, calibrate
from fastinfer.quantize.layer import QuantizedLayer, assemble, fold_target
from fastinfer.quantize.methods import Method
from fastinfer.quantize.report import Report
from fastinfer.quantize.statistics import InputStatistics
from fastinfer.quantize.writer import CheckpointWriter, WriterSettings

# What each method's result is written as; GPTQ's layout holds zero points that every reader takes.
FORMATS = {
    "rtn": "gptq",
    "gptq": "gptq",
    "awq": "gptq",
    "nf4": "bitsandbytes",
    "int8": "compressed-tensors",
    "w8a8": "compressed-tensors",
}


def quantize_checkpoint(
    source: Path,
    out: Path,
    method: Method,
    texts: list[list[int]],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Report:
    """Write a quantised copy of a model. The embedding and the last product stay as they are.

    Args:
        source: folder of safetensors files that are not quantised.
        out: folder to write, new or empty.
        method: how.
        texts: token ids of the calibration texts; all of them are in memory at once.
        progress: is told the number of layers that are done, and of all.

    Raises:
        UnsupportedModelError: the model is quantised already, or a mixture of experts.
        RequestError: the method does not fit the sizes of the model.
    """
    checkpoint = HFCheckpoint(source)
    config = checkpoint.config
    if config.num_experts:
        raise UnsupportedModelError(f"{source}: mixtures of experts cannot be quantised yet")
    if checkpoint.is_quantized:
        raise UnsupportedModelError(f"{source}: the model is quantised already; start from its original weights")
    if checkpoint.is_transposed:
        raise UnsupportedModelError(f"{source}: the formats cannot hold {config.architecture}'s transposed matrices")
    if method.needs_inputs and not texts:
        raise RequestError(f"{method.name} needs a calibration text")
    method.check(config)
    report = Report(asdict(method))
    settings = WriterSettings(
        bits=method.bits,
        group_size=-1 if method.by_row else method.group_size,
        symmetric=method.symmetric,
        int8_activations=method.name == "w8a8",
    )

    def quantize(weight: Calibrated, statistics: InputStatistics) -> None:
        method.quantize(weight, statistics, fold_target(weight.names[0], config) is not None)

    with CheckpointWriter(out, source, FORMATS[method.name], settings) as writer:
        for index, calibrated in enumerate(calibrate(checkpoint, texts, quantize)):
            report.errors |= {", ".join(weight.names): weight.error for weight in calibrated}
            _write_layer(writer, checkpoint, assemble(calibrated, checkpoint))
            progress(index + 1, config.num_layers)
        writer.close(checkpoint.tensors)
    report.bytes_before, report.bytes_after = (weight_file_bytes(folder) for folder in (source, out))
    return report


def _write_layer(writer: CheckpointWriter, checkpoint: HFCheckpoint, layer: QuantizedLayer) -> None:
    """A layer's weights under the names of the original, those in one that it stores as one."""
    modules: dict[str, list[str]] = {}
    for name in layer.weights:
        modules.setdefault(checkpoint.stored_name(name), []).append(name)
    for module, names in modules.items():
        biases = [layer.vectors.pop(f"{name}.bias") for name in names if f"{name}.bias" in layer.vectors]
        weight = concatenate([layer.weights[name] for name in names])
        writer.add_linear(module, weight, torch.cat(biases) if biases else None)
    for name, values in layer.vectors.items():
        stored, _, kind = name.rpartition(".")
        is_bias = kind == "bias"
        module = checkpoint.stored_name(stored if is_bias else name)
        offset = 0.0 if is_bias else checkpoint.norm_offset
        writer.add(f"{module}.{'bias' if is_bias else 'weight'}", values - offset)
