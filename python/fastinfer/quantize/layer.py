"""Conversion of a calibrated layer to the modules of a checkpoint.

Rows return to the checkpoint's order, and the scales of inputs are folded into the modules that produce them.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fastinfer.formats.unpacked import Unpacked
from fastinfer.models.checkpoint import Checkpoint, split_name
from fastinfer.models.config import ModelConfig
from fastinfer.ops.pack import TILE_ROWS
from fastinfer.quantize.calibration import CalibratedWeight
from fastinfer.quantize.weight import fold_into_rows


@dataclass(eq=False)
class QuantizedLayer:
    """Modules of a layer under the project's names.

    Attributes:
        weights: quantised weights by module.
        vectors: biases and norm weights that have changed or belong to a quantised weight.
    """

    weights: dict[str, Unpacked] = field(default_factory=dict)
    vectors: dict[str, Tensor] = field(default_factory=dict)


def fold_target(name: str, config: ModelConfig) -> str | None:
    """Return the norm or module that produces a module's inputs and can absorb a factor per input, if there is one."""
    layer, _, part = name.rpartition(".")
    index, _, _ = split_name(name)
    if part == "gate_proj" and config.has_experts(index):
        return None  # the router and other experts read the same norm
    if part in ("q_proj", "gate_proj") or (part == "up_proj" and not config.gated):
        if not config.pre_norms or config.parallel:  # no norm, or one for both
            return None
        return f"{layer}.{'attention_norm' if part == 'q_proj' else 'mlp_norm'}"
    if part == "down_proj" and config.gated:
        return f"{layer}.up_proj"
    # Values that other layers read, too, cannot absorb the factors of one, nor can those that are normalised.
    own = not config.v_norm and (not config.kv_layers or config.kv_layers.count(index) == 1)
    if part == "o_proj" and own and config.num_heads == config.kv_shape(index).num_heads:
        return f"{layer}.v_proj"
    return None


def assemble(calibrated: list[CalibratedWeight], checkpoint: Checkpoint) -> QuantizedLayer:
    """Split the calibrated weights of a layer into modules and fold their input scales."""
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


def _fold(layer: QuantizedLayer, weight: CalibratedWeight, checkpoint: Checkpoint) -> None:
    """Divide the norm or the rows that produce a weight's inputs by its input scales."""
    target, scales = fold_target(weight.names[0], checkpoint.config), weight.input_scales
    assert target is not None
    assert scales is not None
    if target.endswith("norm"):
        names = [target]
        if checkpoint.config.norm == "layer_norm" and checkpoint.config.norm_bias:
            names.append(f"{target}.bias")
        for name in names:
            layer.vectors[name] = checkpoint.vector(name, len(scales)) / scales
        return
    layer.weights[target] = fold_into_rows(layer.weights[target], scales)
    if f"{target}.bias" in layer.vectors:
        layer.vectors[f"{target}.bias"] = layer.vectors[f"{target}.bias"] / scales


def _order(weight: CalibratedWeight) -> Tensor:
    """Return the order of the rows in which interleaved gate and up projections follow each other."""
    numbers = torch.arange(weight.out_features)
    is_gated = len(weight.names) == 2 and weight.names[0].endswith("gate_proj")
    return numbers.view(-1, 2, TILE_ROWS).transpose(0, 1).flatten() if is_gated else numbers


def _out_features(name: str, config: ModelConfig) -> int:
    layer, part, rest = split_name(name)
    if rest.endswith(("gate_proj", "up_proj")):
        return config.shared_intermediate_size if part == "shared_expert" else config.intermediate_size
    return {
        "output_gate": config.q_size(layer),
        "q_proj": config.q_size(layer),
        "k_proj": config.kv_size(layer),
        "v_proj": config.kv_size(layer),
        "gate_proj": config.mlp_size(layer),
        "up_proj": config.mlp_size(layer),
        "per_layer_gate": config.per_layer_size,
    }.get(part, config.hidden_size)
