"""Quantisation of a folder of safetensors files, or of a GGUF file, into a new folder, layer by layer."""

import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from fastinfer.errors import QuantizationError, RequestError, UnsupportedModelError
from fastinfer.formats.gguf_shards import open_gguf
from fastinfer.formats.safetensors_folder import SafetensorsFolder
from fastinfer.formats.unpacked import concatenate
from fastinfer.models.config import ModelConfig
from fastinfer.models.hf_checkpoint import HFCheckpoint
from fastinfer.models.state_config import LinearAttentionConfig
from fastinfer.quantize.calibration import CalibratedWeight, calibrate, convert
from fastinfer.quantize.gguf_folder import folder_of_gguf
from fastinfer.quantize.layer import QuantizedLayer, assemble, fold_target
from fastinfer.quantize.layout import WriterSettings
from fastinfer.quantize.methods import Method
from fastinfer.quantize.report import Report
from fastinfer.quantize.statistics import InputStatistics
from fastinfer.quantize.weight import quantize_weight
from fastinfer.quantize.writer import SHARD_BYTES, CheckpointWriter
from fastinfer.utils.checks import check_new_folder

# File format of each method's result. GPTQ's layout stores zero points in a form that every reader accepts.
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
    """Write a quantised copy of a model. The embedding and the output projection are not quantised.

    Args:
        source: folder of safetensors files that are not quantised, or a GGUF file with weights in F32, F16, BF16 or
            Q8_0. Of the latter a folder is made first, beside ``out``, and removed at the end.
        out: folder to write, new or empty.
        method: the method and its numbers.
        texts: token ids of the calibration texts, all of them in memory at once; none for a method that needs none,
            which is faster and reports the errors of the weights.
        progress: function that is called with the number of finished layers, at first 0, and the number of all layers.

    Returns:
        The error of each layer and the sizes of the files.

    Raises:
        UnsupportedModelError: the model is quantised already or has transposed matrices, or the GGUF file's
            architecture is not among those that can be quantised.
        QuantizationError: a weight has numbers that the format cannot hold.
        RequestError: the method does not fit the sizes of the model, or needs calibration texts; or a text is longer
            than the model's context; or the folder is not empty or cannot be written.
    """
    out = out.resolve()  # "." has no name, from which those of other folders are made
    if not source.is_dir():
        check_new_folder("out", out)
        file = open_gguf(source)
        with folder_of_gguf(file, out, SHARD_BYTES) as folder:
            report = quantize_checkpoint(folder, out, method, texts, progress)
        report.bytes_before = sum(path.stat().st_size for path in file.files)
        return report
    checkpoint = HFCheckpoint(source)
    config = checkpoint.config
    if checkpoint.is_quantized:
        raise UnsupportedModelError(f"{source}: the model is quantised already; start from its original weights")
    if checkpoint.is_transposed:
        raise UnsupportedModelError(f"{source}: the formats cannot hold {config.architecture}'s transposed matrices")
    if method.needs_inputs and not texts:
        raise RequestError(f"{method.name} needs a calibration text")
    method.check(config)
    config.check_length(max(map(len, texts), default=0))
    report = Report(asdict(method), "outputs" if texts else "weights")
    settings = WriterSettings(
        bits=method.bits,
        group_size=-1 if method.by_row else method.group_size,
        symmetric=method.symmetric,
        int8_activations=method.name == "w8a8",
    )

    def quantize(weight: CalibratedWeight, statistics: InputStatistics | None) -> None:
        try:
            quantize_weight(method, weight, statistics, fold_target(weight.names[0], config) is not None)
        except QuantizationError as error:
            raise QuantizationError(f"layer '{', '.join(dict.fromkeys(weight.names))}': {error}") from None

    with CheckpointWriter(out, source, FORMATS[method.name], settings) as writer:
        progress(0, config.num_layers)
        layers = calibrate(checkpoint, texts, quantize) if texts else convert(checkpoint, quantize)
        for index, calibrated in enumerate(layers):
            report.errors |= _errors(calibrated)
            for module in dict.fromkeys(checkpoint.stored_name(name) for name in _dense_modules(config, index)):
                writer.leave_dense(module)
            _write_layer(writer, checkpoint, assemble(calibrated, checkpoint))
            progress(index + 1, config.num_layers)
        writer.close(checkpoint.tensors)
    report.bytes_before, report.bytes_after = map(_num_bytes, (checkpoint.tensors, SafetensorsFolder(out)))
    return report


def _num_bytes(folder: SafetensorsFolder) -> int:
    return sum(file.stat().st_size for file in folder.files)


def _errors(calibrated: list[CalibratedWeight]) -> dict[str, float]:
    """Return the error of each weight by the names of its modules, and for experts their mean."""
    errors: dict[str, list[float]] = {}
    for weight in calibrated:
        names = (re.sub(r"\.experts\.\d+\.", ".experts.", name) for name in dict.fromkeys(weight.names))
        errors.setdefault(", ".join(names), []).append(weight.error)
    return {name: sum(each) / len(each) for name, each in errors.items()}


def _dense_modules(config: ModelConfig, layer: int) -> list[str]:
    """Return the linear layers of a layer that are not quantised."""
    names = []
    if config.latent_attention is not None:
        names.append("kv_b_proj")  # one half is applied to queries, transposed: its groups of inputs would be others
    if config.has_indexer(layer):
        names += ["index_q_proj", "index_k_proj", "index_weights"]  # a small error could choose other tokens
    if config.has_state(layer) and isinstance(config.states, LinearAttentionConfig):
        names += ["in_proj_a", "in_proj_b"]  # their errors add up over all tokens
        names += ["in_proj_a_up"] if config.states.decay_rank else []
    if config.has_experts(layer):
        names.append("router")  # a small error could choose other experts
        names += ["shared_expert_gate"] if config.shared_expert_gate else []
    return [f"layers.{layer}.{name}" for name in names]


def _write_layer(writer: CheckpointWriter, checkpoint: HFCheckpoint, layer: QuantizedLayer) -> None:
    """Write a layer under the names in the original checkpoint, whose experts get modules of their own.

    Modules that it stores as one have its order of rows.
    """
    modules: dict[str, list[str]] = {}
    rows: dict[str, list[Tensor]] = {}
    for name in layer.weights:
        module, numbers = checkpoint.single_module(name)
        modules.setdefault(module, []).append(name)
        rows.setdefault(module, []).extend([] if numbers is None else [numbers])
    for module, names in modules.items():
        weight = concatenate([layer.weights[name] for name in names])
        biases = [layer.vectors.pop(f"{name}.bias") for name in names if f"{name}.bias" in layer.vectors]
        bias = torch.cat(biases) if biases else None
        if rows[module]:
            order = torch.cat(rows[module]).argsort()
            weight, bias = weight.rows(order), None if bias is None else bias[order]
        for stack in {stack for name in names if (stack := checkpoint.stack_of(name)) is not None}:
            writer.replace(stack)
            if bias is not None:
                writer.replace(f"{stack}_bias")
                bias = bias.to(checkpoint.tensors.dtype(f"{stack}_bias"))
        writer.add_linear(module, weight, bias)
    for name, values in layer.vectors.items():
        stored, _, kind = name.rpartition(".")
        is_bias = kind == "bias"
        module = checkpoint.stored_name(stored if is_bias else name)
        offset = 0.0 if is_bias else checkpoint.norm_offset(name)
        writer.add(f"{module}.{'bias' if is_bias else 'weight'}", values - offset)
