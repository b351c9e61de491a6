"""Conversion of a calibrated layer to the modules of a checkpoint.

Rows return to the checkpoint's order, and the scales of inputs are folded into the modules that produce them.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fastinfer.formats.unpacked import Unpacked, concatenate
from fastinfer.models.checkpoint import Checkpoint, split_name
from fastinfer.models.config import ModelConfig
from fastinfer.models.state_config import LinearAttentionConfig, ShortConvConfig
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
    if part == "q_b_proj":
        if config.has_indexer(index):
            return None  # it reads the same norm
        return f"{layer}.q_a_norm"
    if part in ("gate_proj", "up_proj") and config.has_experts(index):
        return None  # the router and other experts read the same norm
    first = part == "q_proj" or (part == "in_proj" and isinstance(config.states, ShortConvConfig))
    if first or part == "gate_proj" or (part == "up_proj" and not config.gated):
        # No norm, or one for both; the projections of latent attention are two weights with one norm.
        is_shared = config.latent_attention is not None or config.has_parallel_layers
        if not (config.has_pre_norms(index) and config.norm_weights) or config.parallel or (first and is_shared):
            return None
        return f"{layer}.{'attention_norm' if first else 'mlp_norm'}"
    if part == "down_proj" and config.gated:
        # It adds 1 to the product of up before it multiplies.
        limit_of = config.shared_swiglu_limit if layer.endswith(".shared_expert") else config.swiglu_limit
        return None if config.activation == "clamped_swiglu" or limit_of(index) else f"{layer}.up_proj"
    # Values that other layers read, too, cannot absorb the factors of one, nor can those that are normalised.
    own = not config.v_norm and (not config.kv_layers or config.kv_layers.count(index) == 1)
    is_plain = config.latent_attention is None and config.query_heads(index) == config.kv_shape(index).num_heads
    return f"{layer}.v_proj" if part == "o_proj" and own and is_plain else None


def assemble(calibrated: list[CalibratedWeight], checkpoint: Checkpoint) -> QuantizedLayer:
    """Split the calibrated weights of a layer into modules and fold their input scales."""
    config, layer = checkpoint.config, QuantizedLayer()
    for weight in calibrated:
        assert weight.result is not None
        order = _order(weight)
        rows, bias = weight.result.rows(order), None if weight.bias is None else weight.bias[order]
        start = 0
        for name, size in zip(weight.names, _sizes(weight, config), strict=True):
            own = torch.arange(start, start + size)
            if config.value_dim and name.endswith(".v_proj"):
                own = own.view(-1, config.head_dim)[:, : config.value_dim].flatten()
            _append(layer, name, rows.rows(own), None if bias is None else bias[own])
            start += size
    _interleave_gates(layer, config)
    for weight in calibrated:
        if weight.input_scales is not None:
            _fold(layer, weight, checkpoint)
    return layer


def _append(layer: QuantizedLayer, name: str, rows: Unpacked, bias: Tensor | None) -> None:
    """Add rows of a module behind those that the layer has."""
    if name not in layer.weights:
        layer.weights[name] = rows
    else:
        layer.weights[name] = concatenate([layer.weights[name], rows])
        bias = None if bias is None else torch.cat([layer.vectors[f"{name}.bias"], bias])
    if bias is not None:
        layer.vectors[f"{name}.bias"] = bias


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


def _sizes(weight: CalibratedWeight, config: ModelConfig) -> list[int]:
    """Return how many of a weight's rows each of its modules has. A module that comes twice has two runs of rows."""
    layer, part, _ = split_name(weight.names[0])
    if len(weight.names) == 1:
        return [weight.out_features]
    if weight.names[0].endswith("gate_proj"):
        return [weight.out_features // 2] * 2
    if part.startswith("in_proj_q"):
        assert isinstance(config.states, LinearAttentionConfig)
        rows = config.states.qkv_sizes | config.states.other_sizes
        return [rows[split_name(name)[1]] for name in weight.names]
    sizes = {"k_proj": config.kv_size(layer), "v_proj": config.kv_size(layer), "output_gate": config.gate_size(layer)}
    return [sizes.get(split_name(name)[1], config.q_size(layer)) for name in weight.names]


def _interleave_gates(layer: QuantizedLayer, config: ModelConfig) -> None:
    """Put the rows of attention's output gate, which come last here, behind those of each head's query."""
    for name in layer.weights:
        if name.endswith(".q_proj") and config.output_gate and not config.separate_gate:
            order = torch.cat(config.query_rows(split_name(name)[0])).argsort()
            layer.weights[name] = layer.weights[name].rows(order)
            if f"{name}.bias" in layer.vectors:
                layer.vectors[f"{name}.bias"] = layer.vectors[f"{name}.bias"][order]
