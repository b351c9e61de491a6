"""Reading of the MLP of one layer, or of what it has in its place."""

from dataclasses import replace

import torch

from fastinfer.errors import UnsupportedModelError
from fastinfer.models.activation import XIELU
from fastinfer.models.checkpoint import XIELU_PARAMETERS
from fastinfer.models.expert_loader import load_mixture
from fastinfer.models.gate_up_loader import GATE_UP, read_gate_up, read_gate_up_bias
from fastinfer.models.layer_reader import LayerReader
from fastinfer.models.mlp import MLP, GatedMLP, MLPBesideExperts, PlainMLP
from fastinfer.models.norm import Norm, RMSNorm


def load_mlp(reader: LayerReader, index: int) -> MLP | None:
    """Read the MLP or the experts of a layer; None if it has none."""
    config, layer = reader.config, f"layers.{index}"
    if not config.has_mlp(index):
        return None
    inner = config.mlp_size(index)
    norm = reader.pre_norm(f"{layer}.mlp_norm", factor=config.mlp_input_scale)
    # The last part of a layer multiplies its output by the layer's scale.
    factor = 1.0 if config.per_layer_size else reader.layer_scale(index)
    post_norm = f"{layer}.post_mlp_norm"
    if config.has_experts(index):
        if config.mlp_beside_experts:
            return _mlp_beside_experts(reader, index, norm, factor)
        has_norm = config.experts_post_norm or config.has_post_norms(index)
        return load_mixture(reader, index, norm, reader.post_norm(post_norm) if has_norm else None)
    down = reader.output(f"{layer}.down_proj", inner, config.mlp_bias, post_norm, reader.scale, factor)
    if not config.gated:
        up = reader.concatenated({f"{layer}.up_proj": inner}, config.mlp_bias)
        activation = read_xielu(reader, layer) if config.activation == "xielu" else config.activation
        return PlainMLP(norm, up, down, activation)
    gate_up = read_gate_up(reader, layer, inner)
    bias = read_gate_up_bias(reader, layer, inner) if config.mlp_bias else None
    names = tuple(f"{layer}.{name}" for name in GATE_UP)
    return GatedMLP(norm, reader.weight(names, gate_up, bias), down, config.activation, config.swiglu_limit(index))


def read_xielu(reader: LayerReader, layer: str) -> XIELU:
    """Read the factors of a layer's activation, of which files have those before a softplus.

    Raises:
        UnsupportedModelError: a factor is not finite, or ``eps`` is not in -1 .. 0.
    """
    values = torch.cat([reader.checkpoint.vector(f"{layer}.{name}", 1) for name in XIELU_PARAMETERS])
    alpha_p, alpha_n = torch.nn.functional.softplus(values[:2]).tolist()
    beta, eps = values[2:].tolist()
    if not values.isfinite().all() or not -1.0 <= eps <= 0.0:
        raise UnsupportedModelError(
            f"{reader.checkpoint.path}: {layer}: {', '.join(XIELU_PARAMETERS)}: expected finite numbers, of which the "
            f"last one is in -1 .. 0, got {values.tolist()!r:.80}"
        )
    return XIELU(alpha_p, beta + alpha_n, beta, eps)


def _mlp_beside_experts(reader: LayerReader, index: int, norm: Norm, factor: float) -> MLPBesideExperts:
    config, hidden, layer = reader.config, reader.config.hidden_size, f"layers.{index}"
    inner = config.dense_intermediate_size
    router_norm = reader.vector(f"{layer}.router_scale", hidden) * hidden**-0.5
    experts = replace(
        load_mixture(
            reader,
            index,
            reader.pre_norm(f"{layer}.experts_norm"),
            RMSNorm(reader.vector(f"{layer}.post_experts_norm", hidden), config.norm_eps),
        ),
        router_norm=RMSNorm(router_norm, config.norm_eps),
        expert_scale=reader.vector(f"{layer}.expert_scale", config.num_experts),
    )
    names = tuple(f"{layer}.{name}" for name in GATE_UP)
    gate_up = reader.weight(names, read_gate_up(reader, layer, inner), None)
    down = reader.output(f"{layer}.down_proj", inner, False, f"{layer}.post_dense_norm")
    post_norm = RMSNorm(reader.vector(f"{layer}.post_mlp_norm", hidden), config.norm_eps)
    return MLPBesideExperts(GatedMLP(norm, gate_up, down, config.activation), experts, post_norm, factor)
