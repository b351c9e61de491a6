"""Joining of each sum of all ranks with the norm that follows it: one operator, and on a GPU one launch."""

from dataclasses import replace
from typing import Any, TypeVar

from fastinfer.models.decoder import Decoder, DecoderLayer
from fastinfer.models.mlp import GatedMLP, MLPBesideExperts, PlainMLP
from fastinfer.models.moe import MixtureOfExperts
from fastinfer.models.norm import Norm, RMSNorm
from fastinfer.models.projection import OutputProjection
from fastinfer.parallel.reduced_weights import ReducedExperts, ReducedOutput
from fastinfer.parallel.reduction import NormOfSum
from fastinfer.weights.expert_weights import ExpertWeights

Model = TypeVar("Model", bound=Decoder)
# What a layer's attention or MLP ends with.
Output = OutputProjection | ExpertWeights


def with_fused_norms(model: Model) -> Model:
    """Return the model with the norms joined that follow a sum directly.

    That is so for RMSNorms before attention and before the MLP, in models without norms behind them and without other
    parts of layers. The last norm of a model reads some rows alone, so it stays apart.
    """
    layers = list(model.layers)
    if any(layer.parallel or layer.shares_input or layer.per_layer for layer in layers):
        return model
    for index, layer in enumerate(layers):
        if isinstance(layer.mlp, GatedMLP | PlainMLP | MixtureOfExperts):
            output, norm = _joined(layer.attention.output, layer.mlp.norm)
            mlp, attention = replace(layer.mlp, norm=norm), replace(layer.attention, output=output)
            layers[index] = replace(layer, attention=attention, mlp=mlp)
        if 0 < index != model.config.num_storing_layers:
            before = layers[index - 1]
            output, norm = _joined(_last_output(before), layer.attention.norm)
            layers[index - 1] = _with_last_output(before, output)
            layers[index] = replace(layers[index], attention=replace(layers[index].attention, norm=norm))
    return replace(model, layers=tuple(layers))


def _joined(output: Output | None, norm: Norm) -> tuple[Any, Any]:
    """Join a sum and the norm of its result; returns both as they are if one of them is something else."""
    if type(norm) is not RMSNorm:
        return output, norm
    joined = NormOfSum(norm.weight, norm.eps)
    if isinstance(output, ReducedExperts):
        return replace(output, reduction=replace(output.reduction, next_norm=joined)), joined
    if isinstance(output, OutputProjection) and isinstance(output.weight, ReducedOutput) and output.post_norm is None:
        reduction = replace(output.weight.reduction, next_norm=joined)
        return replace(output, weight=replace(output.weight, reduction=reduction)), joined
    return output, norm


def _last_output(layer: DecoderLayer) -> Output | None:
    """Return what a layer ends with; None for experts that end with a norm, perhaps with an MLP beside them."""
    if layer.mlp is None:
        return layer.attention.output
    if isinstance(layer.mlp, MLPBesideExperts) or (isinstance(layer.mlp, MixtureOfExperts) and layer.mlp.post_norm):
        return None
    return layer.mlp.down


def _with_last_output(layer: DecoderLayer, output: Any) -> DecoderLayer:
    if output is None:
        return layer
    if layer.mlp is None:
        return replace(layer, attention=replace(layer.attention, output=output))
    assert not isinstance(layer.mlp, MLPBesideExperts)
    return replace(layer, mlp=replace(layer.mlp, down=output))
