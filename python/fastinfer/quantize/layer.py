"""One quantised layer on its way to the file: rows back in the checkpoint's order, factors of inputs folded away."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fastinfer.formats.unpacked import Unpacked
from fastinfer.models.checkpoint import Checkpoint
from fastinfer.models.config import ModelConfig
from fastinfer.ops.pack import TILE_ROWS
from fastinfer.quantize.calibration import Calibrated
from fastinfer.quantize.methods import fold_into_rows


@dataclass(eq=False)
class QuantizedLayer:
    """A layer's modules by the project's names.

    Attributes:
        weights: quantised.
        vectors: biases and norms, where they have changed or belong to a quantised weight.
    """

    weights: dict[str, Unpacked] = field(default_factory=dict)
    vectors: dict[str, Tensor] = field(default_factory=dict)


def fold_target(name: str, config: ModelConfig) -> str | None:
    """What makes the inputs of a module, and can take up a factor of each: a norm, or the rows of another module."""
    layer, _, part = name.rpartition(".")
    if part in ("q_proj", "gate_proj") or (part == "up_proj" and not config.gated):
        return f"{layer}.{'attention_norm' if part == 'q_proj' else 'mlp_norm'}"
    if part == "down_proj" and config.gated:
        return f"{layer}.up_proj"
    if part == "o_proj" and config.num_heads == config.num_kv_heads:
        return f"{layer}.v_proj"
    return None


def assemble(calibrated: list[Calibrated], checkpoint: Checkpoint) -> QuantizedLayer:
    """Split and fold what a layer's calibration has left."""
    config, layer = checkpoint.config, QuantizedLayer()
    for weight in calibrated:
        assert weight.result is not None
        start = 0
        order = _order(weight)
        rows, bias = weight.result.rows(order), None if weight.bias is None else weight.bias[order]
        for name in weight.names:
            end = start + _out_features(name, config)
            layer.weights[name] = rows.rows(slice(start, end))
            if bias is not None:
                layer.vectors[f"{name}.bias"] = bias[start:end]
            start = end
    for weight in calibrated:
        if weight.input_scales is not None:
            _fold(layer, weight, checkpoint)
    return layer


def _fold(layer: QuantizedLayer, weight: Calibrated, checkpoint: Checkpoint) -> None:
    """Divide what makes the inputs by their scales."""
    target, scales = fold_target(weight.names[0], checkpoint.config), weight.input_scales
    assert target is not None
    assert scales is not None
    if target.endswith("norm"):
        names = [target] + ([f"{target}.bias"] if checkpoint.config.norm == "layer_norm" else [])
        for name in names:
            layer.vectors[name] = checkpoint.vector(name, len(scales)) / scales
        return
    layer.weights[target] = fold_into_rows(layer.weights[target], scales)
    if f"{target}.bias" in layer.vectors:
        layer.vectors[f"{target}.bias"] = layer.vectors[f"{target}.bias"] / scales


def _order(weight: Calibrated) -> Tensor:
    """Row numbers of gate below up, where the two are interleaved; else as they are."""
    numbers = torch.arange(weight.out_features)
    is_gated = len(weight.names) == 2 and weight.names[0].endswith("gate_proj")
    return numbers.view(-1, 2, TILE_ROWS).transpose(0, 1).flatten() if is_gated else numbers


def _out_features(name: str, config: ModelConfig) -> int:
    part = name.rpartition(".")[2]
    return {
        "q_proj": config.num_heads * config.head_dim,
        "k_proj": config.num_kv_heads * config.head_dim,
        "v_proj": config.num_kv_heads * config.head_dim,
        "gate_proj": config.intermediate_size,
        "up_proj": config.intermediate_size,
    }.get(part, config.hidden_size)
