"""Conversion of a model's 4-bit weights to fp32 or 8 bits, to compare the speed of these forms."""

import dataclasses

import torch
from torch import Tensor

from fastinfer.errors import UnsupportedModelError
from fastinfer.models.attention import Attention
from fastinfer.models.decoder import Decoder, DecoderLayer
from fastinfer.models.mlp import GatedMLP
from fastinfer.models.projection import OutputProjection
from fastinfer.quantize.rounding import round_to_int8
from fastinfer.weights.pack import make_weight
from fastinfer.weights.weight import ConcatenatedWeight, DenseWeight, QuantizedWeight, Weight

GROUP = 32
FORMS = ("float32", "int8", "int4")


def repack(decoder: Decoder, form: str) -> Decoder:
    """Convert the weights of a decoder to another form.

    Args:
        decoder: decoder with quantised layers and fp32 hidden states.
        form: ``"float32"`` for the dequantised values, ``"int8"`` for 8 bits with one scale per group of 32 inputs, or
            ``"int4"`` for the weights as they are.

    Raises:
        UnsupportedModelError: some weights of the layers are not quantised, or for ``"int4"`` not to 4 bits.
    """
    check_form(decoder, form)
    if form == "int4":
        return decoder
    embedding = _converted(decoder.embedding, form)
    return dataclasses.replace(
        decoder,
        embedding=embedding,
        layers=tuple(_converted_layer(layer, form) for layer in decoder.layers),
        lm_head=embedding if decoder.lm_head is decoder.embedding else _converted(decoder.lm_head, form),
    )


def check_form(decoder: Decoder, form: str) -> None:
    """Check that a decoder can have a form; the arguments and the errors are those of :func:`repack`."""
    bits = {weight.bits for layer in decoder.layers for weight in _quantized(layer)}
    if form == "int4" and bits != {4}:
        raise UnsupportedModelError(f"the form int4 is the file's own: expected weights of 4 bits, got {sorted(bits)}")


def weight_bytes(decoder: Decoder) -> int:
    """Return the size of all weights, except those of the norms, which are negligible."""
    weights = [weight for layer in decoder.layers for weight in _weights(layer)]
    weights.append(decoder.embedding)
    if decoder.lm_head is not decoder.embedding:
        weights.append(decoder.lm_head)
    return sum(tensor.nbytes for weight in weights for tensor in _tensors(weight))


def _weights(layer: DecoderLayer) -> list[Weight]:
    attention, mlp = _attention(layer), _gated(layer)
    return [attention.qkv, attention.output.weight, mlp.gate_up, mlp.down.weight]


def _attention(layer: DecoderLayer) -> Attention:
    if not isinstance(layer.attention, Attention):
        raise UnsupportedModelError(f"expected a model of full attention, got {type(layer.attention).__name__}")
    return layer.attention


def _gated(layer: DecoderLayer) -> GatedMLP:
    if not isinstance(layer.mlp, GatedMLP):
        raise UnsupportedModelError(f"expected a model of gated MLPs, got {type(layer.mlp).__name__}")
    return layer.mlp


def _quantized(layer: DecoderLayer) -> list[QuantizedWeight]:
    parts = [part for weight in _weights(layer) for part in _parts(weight)]
    for part in parts:
        if not isinstance(part, QuantizedWeight):
            raise UnsupportedModelError(f"expected a model of quantised weights, got {type(part).__name__}")
    return parts  # type: ignore[return-value]


def _parts(weight: Weight) -> tuple[Weight, ...]:
    return weight.parts if isinstance(weight, ConcatenatedWeight) else (weight,)


def _tensors(weight: Weight) -> list[Tensor]:
    tensors: list[Tensor] = []
    for part in _parts(weight):
        if isinstance(part, DenseWeight):
            tensors.append(part.values)
        elif isinstance(part, QuantizedWeight):
            tensors += [t for t in (part.qweight, part.scales, part.mins) if t is not None]
    return tensors


def _converted_layer(layer: DecoderLayer, form: str) -> DecoderLayer:
    attention, mlp = _attention(layer), _gated(layer)

    def output(projection: OutputProjection) -> OutputProjection:
        return dataclasses.replace(projection, weight=_converted(projection.weight, form))

    return DecoderLayer(
        dataclasses.replace(attention, qkv=_converted(attention.qkv, form), output=output(attention.output)),
        dataclasses.replace(mlp, gate_up=_converted(mlp.gate_up, form), down=output(mlp.down)),
    )


def _converted(weight: Weight, form: str) -> Weight:
    values = weight.rows(None, torch.float32)
    if form == "float32":
        return DenseWeight(values)
    first = _parts(weight)[0]
    return make_weight(round_to_int8(values, GROUP), first.activation_bits if isinstance(first, QuantizedWeight) else 8)
