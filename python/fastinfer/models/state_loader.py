"""Reading of what layers with a state have in the place of attention."""

from dataclasses import replace

import torch
from torch import Tensor

from fastinfer.formats.unpacked import Dense, concatenate
from fastinfer.models.layer_reader import LayerReader, unquantized
from fastinfer.models.linear_attention import LinearAttention
from fastinfer.models.mamba2 import Mamba2
from fastinfer.models.norm import factor_norm
from fastinfer.models.short_conv import ShortConv
from fastinfer.models.state_config import LinearAttentionConfig, Mamba2Config, ShortConvConfig
from fastinfer.weights.weight import ConcatenatedWeight, Weight


def load_state_layer(reader: LayerReader, index: int) -> LinearAttention | Mamba2 | ShortConv:
    """Read what a layer with a state has in the place of attention."""
    sizes = reader.config.states
    if isinstance(sizes, ShortConvConfig):
        return _short_conv(reader, f"layers.{index}", sizes)
    if isinstance(sizes, Mamba2Config):
        return _mamba2(reader, f"layers.{index}", sizes)
    assert sizes is not None
    return _linear_attention(reader, index, sizes)


def _linear_attention(reader: LayerReader, index: int, sizes: LinearAttentionConfig) -> LinearAttention:
    config, layer, checkpoint = reader.config, f"layers.{index}", reader.checkpoint
    # The errors of these two add up over all tokens, so neither they nor their input are quantised.
    head_gates = [
        checkpoint.linear(f"{layer}.{name}", sizes.other_sizes[name], config.hidden_size).dequantize()
        for name in ("in_proj_a", "in_proj_b")
    ]
    second = {
        name: checkpoint.linear(f"{layer}.{name}", outputs, inputs)
        for name, (inputs, outputs) in sizes.second_sizes.items()
    }
    gate_up, decay_up = second.get("in_proj_z_up"), second.get("in_proj_a_up")
    output = reader.output(f"{layer}.out_proj", sizes.value_size, False, f"{layer}.post_attention_norm")
    return LinearAttention(
        sizes=sizes,
        norm=reader.pre_norm(f"{layer}.attention_norm"),
        qkvz=_qkvz(reader, layer, sizes),
        gate_up=None if gate_up is None else reader.weight((f"{layer}.in_proj_z_up",), gate_up, None),
        head_gates=reader.make(Dense(torch.cat(head_gates)), 32),
        decay_up=None if decay_up is None else reader.make(Dense(decay_up.dequantize()), 32),
        conv_weight=_conv_weight(reader, layer, sizes.conv_dim, sizes.kernel_size),
        a_log=reader.vector(f"{layer}.A_log", sizes.num_value_heads),
        dt_bias=reader.vector(f"{layer}.dt_bias", sizes.decay_size),
        gated_norm=reader.vector(f"{layer}.gated_norm", sizes.value_dim),
        gated_norm_eps=config.norm_eps if sizes.norm_eps is None else sizes.norm_eps,
        output=replace(output, order=reader.order_of_value_heads(sizes)),
    )


def _qkvz(reader: LayerReader, layer: str, sizes: LinearAttentionConfig) -> Weight:
    """Read the projections of queries, keys, values and gates, as one weight, or gates as one of their own."""
    parts = reader.read({f"{layer}.{name}": size for name, size in sizes.qkv_sizes.items()}, has_bias=False)
    gates = reader.read({f"{layer}.in_proj_z": sizes.other_sizes["in_proj_z"]}, has_bias=False)
    matrices = [matrix for _, matrix, _ in parts]
    fits = len(parts) == 1 or all(matrices[0].fits(matrix) for matrix in (*matrices, gates[0][1]))
    if fits and not sizes.gate_rank:  # the product with the second matrix needs contiguous inputs
        return reader.joined([*parts, *gates], is_split=False)
    # The convolution needs queries, keys and values in one.
    if not all(matrices[0].fits(matrix) for matrix in matrices):
        matrices = [unquantized(reader, matrix) for matrix in matrices]
    qkv = reader.weight(tuple(name for name, _, _ in parts), concatenate(matrices), None)
    return ConcatenatedWeight((qkv, reader.joined(gates, is_split=False)))


def _mamba2(reader: LayerReader, layer: str, sizes: Mamba2Config) -> Mamba2:
    name, wide = f"{layer}.in_proj", sizes.inner_size + sizes.conv_dim
    ((_, projection, bias),) = reader.read({name: wide + sizes.num_heads}, sizes.projection_bias)
    dt = Dense(projection.rows(slice(wide, None)).dequantize())
    conv_weight = _conv_weight(reader, layer, sizes.conv_dim, sizes.kernel_size)
    states = sizes.num_groups * sizes.state_dim
    for part, scale in zip(conv_weight.split([sizes.inner_size, states, states]), sizes.conv_scales, strict=True):
        part.mul_(scale)
    gated_norm, gated_norm_eps = _gated_norm(reader, layer, sizes)
    return Mamba2(
        sizes=sizes,
        norm=reader.pre_norm(f"{layer}.attention_norm", factor=sizes.input_scale),
        zxbc=reader.weight((name,), projection.rows(slice(0, wide)), None if bias is None else bias[:wide]),
        # Errors of the time steps add up over all tokens, so neither they nor their input are quantised.
        dt=reader.weight((name,), dt, None if bias is None else bias[wide:], 32, sizes.dt_scale),
        conv_weight=conv_weight,
        conv_bias=reader.vector(f"{layer}.conv1d.bias", sizes.conv_dim) if sizes.conv_bias else None,
        a_log=reader.vector(f"{layer}.A_log", sizes.num_heads),
        dt_bias=reader.vector(f"{layer}.dt_bias", sizes.num_heads),
        d=reader.vector(f"{layer}.D", sizes.num_heads),
        gated_norm=gated_norm,
        gated_norm_eps=gated_norm_eps,
        output=reader.output(
            f"{layer}.out_proj", sizes.inner_size, sizes.projection_bias, f"{layer}.post_attention_norm"
        ),
    )


def _gated_norm(reader: LayerReader, layer: str, sizes: Mamba2Config) -> tuple[Tensor | None, float]:
    """Read the weight of the norm of the gated output, times the output's factor, and return it with its eps."""
    if sizes.has_norm:
        return reader.vector(f"{layer}.gated_norm", sizes.inner_size) * sizes.output_scale, reader.config.norm_eps
    if sizes.output_scale == 1.0:
        return None, 0.0
    norm = factor_norm(sizes.output_scale, sizes.inner_size, reader.device)
    return norm.weight, norm.eps


def _short_conv(reader: LayerReader, layer: str, sizes: ShortConvConfig) -> ShortConv:
    dim = sizes.conv_dim
    return ShortConv(
        norm=reader.pre_norm(f"{layer}.attention_norm"),
        in_proj=reader.concatenated({f"{layer}.in_proj": 3 * dim}, sizes.has_bias),
        conv_weight=_conv_weight(reader, layer, sizes.conv_dim, sizes.kernel_size),
        conv_bias=reader.vector(f"{layer}.conv1d.bias", dim) if sizes.has_bias else None,
        output=reader.output(f"{layer}.out_proj", dim, sizes.has_bias, f"{layer}.post_attention_norm"),
    )


def _conv_weight(reader: LayerReader, layer: str, dim: int, kernel_size: int) -> Tensor:
    weight = reader.checkpoint.linear(f"{layer}.conv1d", dim, kernel_size)
    # A copy, or the file could stay mapped.
    return weight.dequantize().to(reader.device, copy=True)
