"""Reading of the inputs that each layer has of its own."""

import torch

from fastinfer.models.layer_reader import LayerReader
from fastinfer.models.norm import RMSNorm
from fastinfer.models.per_layer_input import PerLayerGate, PerLayerInputs


def load_per_layer_inputs(reader: LayerReader, layers: range) -> PerLayerInputs | None:
    """Read what makes the inputs of consecutive layers; None for a model whose layers have none."""
    config, size = reader.config, reader.config.per_layer_size
    if not size:
        return None
    width = config.num_layers * size
    projection, own = reader.checkpoint.linear("per_layer_model_projection", width, config.hidden_size), None
    if len(layers) < config.num_layers:
        own = torch.arange(layers.start * size, layers.stop * size)
        projection = projection.rows(own)
    # The factor of the second embedding is that of the sum, so the norm's weight is divided by it.
    norm = RMSNorm(reader.vector("per_layer_norm", size) * size**-0.5, config.norm_eps)
    return PerLayerInputs(
        embedding=reader.vocabulary("per_layer_embedding", config.vocab_size, width, own),
        projection=reader.make(projection, reader.precision.activation_bits),
        norm=norm,
        factor=(size / 2) ** 0.5,
        size=size,
    )


def load_per_layer_gate(reader: LayerReader, index: int) -> PerLayerGate | None:
    """Read what a layer adds for its own input; None if it has none."""
    config, layer, size = reader.config, f"layers.{index}", reader.config.per_layer_size
    if not size:
        return None
    name = f"{layer}.per_layer_gate"
    gate = reader.weight((name,), reader.checkpoint.linear(name, size, config.hidden_size), None)
    post_norm, factor = f"{layer}.post_per_layer_norm", reader.layer_scale(index)
    output = reader.output(f"{layer}.per_layer_projection", size, False, post_norm, reader.scale, factor)
    return PerLayerGate(gate, config.activation, output)
