"""Layers that have a state instead of keys and values, from the metadata of a GGUF file."""

from dataclasses import dataclass, field, replace

import numpy as np

from fastinfer.errors import GGUFFormatError, UnsupportedModelError
from fastinfer.formats.gguf import GGUFFile
from fastinfer.models.config import MAX_SIZE
from fastinfer.models.gguf_architectures import ARCHITECTURES
from fastinfer.models.gguf_fields import flags_by_layer, sizes_by_layer
from fastinfer.models.gguf_nemotron import nemotron_h_layers
from fastinfer.models.state_config import LinearAttentionConfig, Mamba2Config, ShortConvConfig, StateConfig
from fastinfer.models.stored_layers import StoredLayers, split_layers
from fastinfer.models.structure import BAILING_HYBRID, FALCON_H1, KIMI_LINEAR, NEMOTRON_H

_KIMI_DELTA = (KIMI_LINEAR, BAILING_HYBRID)


@dataclass(frozen=True)
class StateLayers:
    """Layers that have a state instead of keys and values.

    Attributes:
        flags: whether each layer has one; empty if none has.
        stored: see :attr:`fastinfer.models.config.ModelConfig.stored_layers`.
        sizes: sizes that the file has for each layer, by their keys, where these are 0 or the same.
    """

    flags: tuple[bool, ...] = ()
    stored: StoredLayers = ()
    sizes: dict[str, int] = field(default_factory=dict)


def state_layers(file: GGUFFile, architecture: str, num_blocks: int) -> StateLayers:
    """Return which layers have a state instead of keys and values, given the number of the file's layers."""
    structure = ARCHITECTURES[architecture].structure
    if structure is FALCON_H1:
        if (key := f"{architecture}.ssm.has_mup") in file.metadata:
            raise UnsupportedModelError(
                f"{file.path}: {key}: the first converter's files are not implemented, whose weights lack the model's "
                "factors"
            )
        return StateLayers((True, False) * num_blocks, split_layers(num_blocks))
    if structure is NEMOTRON_H:
        stored, flags, sizes = nemotron_h_layers(file, architecture, num_blocks)
        return StateLayers(flags, stored, sizes)
    if structure.short_convs or structure.mamba2 or any(structure is kind for kind in _KIMI_DELTA):
        flags, heads = _layers_without_heads(file, architecture, num_blocks)
        return StateLayers(flags, sizes={"attention.head_count_kv": heads})
    return StateLayers(_linear_layers(file, architecture, num_blocks))


def _layers_without_heads(file: GGUFFile, architecture: str, num_layers: int) -> tuple[tuple[bool, ...], int]:
    """Return which layers have no key and value heads, and how many the others have; the first is empty if all have."""
    key = "attention.head_count_kv"
    file.get(f"{architecture}.{key}", np.ndarray)  # a list, even where all layers have the same number
    counts = sizes_by_layer(file, architecture, key, minimum=0)[:num_layers]
    values = {count for count in counts if count}
    if ARCHITECTURES[architecture].structure.mamba2 and len(values) == 1 and all(counts):
        return (), values.pop()
    if len(values) != 1 or all(counts):
        raise GGUFFormatError(
            f"{file.path}: {architecture}.{key}: expected {num_layers} numbers, some 0 and the others equal, "
            f"got {counts!r:.80}"
        )
    return tuple(not count for count in counts), values.pop()


def _linear_layers(file: GGUFFile, architecture: str, num_layers: int) -> tuple[bool, ...]:
    """Return whether each layer has linear attention; empty for an architecture without such layers."""
    period = ARCHITECTURES[architecture].structure.linear_period
    if not period:
        return ()
    name = "attention.recurrent_layers"  # older files do not have it
    if f"{architecture}.{name}" in file.metadata:
        linear = flags_by_layer(file, architecture, name)[:num_layers]
        if len(set(linear)) != 2:
            raise UnsupportedModelError(
                f"{file.path}: {architecture}.{name}: expected layers with linear attention and layers with full "
                f"attention, got {linear!r:.80}"
            )
        return tuple(linear)
    key = f"{architecture}.full_attention_interval"
    period = file.get(key, int, period, minimum=1, maximum=MAX_SIZE)
    if not 2 <= period <= num_layers:
        raise UnsupportedModelError(
            f"{file.path}: {key}: expected layers with linear attention and layers with full attention among "
            f"{num_layers}, got {period}"
        )
    return tuple((layer + 1) % period != 0 for layer in range(num_layers))


def state_sizes(file: GGUFFile, architecture: str, hidden_size: int) -> StateConfig:
    """Return the sizes of the layers with states."""
    structure = ARCHITECTURES[architecture].structure
    if structure.mamba2:
        return _mamba2(file, architecture)
    if any(structure is kind for kind in _KIMI_DELTA):
        return _kimi_delta_attention(file, architecture)
    if not structure.short_convs:
        return _linear_attention(file, architecture)
    key = f"{architecture}.shortconv.l_cache"
    sizes = ShortConvConfig(hidden_size, file.get(key, int, minimum=1))
    if problem := sizes.unsupported(key):
        raise UnsupportedModelError(f"{file.path}: {problem}")
    return sizes


def _linear_attention(file: GGUFFile, architecture: str) -> LinearAttentionConfig:
    """Return the sizes of the layers with linear attention, which must be those that the operators support."""
    prefix = f"{architecture}.ssm"
    read = _read_sizes(file, prefix)
    key_heads, value_heads = read["group_count"], read["time_step_rank"]
    sizes = LinearAttentionConfig(
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_dim=read["state_size"],
        value_dim=read["inner_size"] // value_heads,
        kernel_size=read["conv_kernel"],
        tiled_output=ARCHITECTURES[architecture].tiled_values and value_heads > key_heads,
    )
    value_dim = f"{prefix}.inner_size / {prefix}.time_step_rank"
    if problem := sizes.unsupported(f"{prefix}.state_size", value_dim, f"{prefix}.conv_kernel"):
        raise UnsupportedModelError(f"{file.path}: {problem}")
    return sizes


def _kimi_delta_attention(file: GGUFFile, architecture: str) -> LinearAttentionConfig:
    """Return the same of layers with a decay for each channel, which have as many heads as the other layers."""
    heads = file.get(f"{architecture}.attention.head_count", int, minimum=1, maximum=MAX_SIZE)
    head_dim, kernel_size = f"{architecture}.kda.head_dim", f"{architecture}.ssm.conv_kernel"
    dim, taps = (file.get(key, int, minimum=1, maximum=MAX_SIZE) for key in (head_dim, kernel_size))
    sizes = LinearAttentionConfig(heads, heads, dim, dim, taps)
    if problem := sizes.unsupported(head_dim, head_dim, kernel_size):
        raise UnsupportedModelError(f"{file.path}: {problem}")
    if ARCHITECTURES[architecture].structure is KIMI_LINEAR:
        return sizes.with_channel_decays(dim)
    bounded = f"{architecture}.kda.safe_gate"
    if not file.get(bounded, bool, True):
        raise UnsupportedModelError(f"{file.path}: {bounded} must be True, got False")
    bound = file.get(f"{architecture}.kda.gate_lower_bound", float, minimum=-1e3, maximum=-1e-3)
    return replace(sizes.with_channel_decays(rank=0), decay_bound=bound)


def _mamba2(file: GGUFFile, architecture: str) -> Mamba2Config:
    """Return the sizes of the Mamba-2 layers, which must be those that the operators support."""
    prefix = f"{architecture}.ssm"
    read = _read_sizes(file, prefix)
    heads = read["time_step_rank"]
    has_conv_bias = any(name.endswith(".ssm_conv1d.bias") for name in file.tensors)
    # Only Falcon-H1 may have none.
    is_optional = ARCHITECTURES[architecture].structure is FALCON_H1
    sizes = Mamba2Config(
        num_heads=heads,
        head_dim=read["inner_size"] // heads,
        state_dim=read["state_size"],
        num_groups=read["group_count"],
        kernel_size=read["conv_kernel"],
        conv_bias=has_conv_bias,
        has_norm=not is_optional or any(name.endswith(".ssm_norm.weight") for name in file.tensors),
    )
    head_dim = f"{prefix}.inner_size / {prefix}.time_step_rank"
    if problem := sizes.unsupported(head_dim, f"{prefix}.state_size", f"{prefix}.conv_kernel"):
        raise UnsupportedModelError(f"{file.path}: {problem}")
    return sizes


def _read_sizes(file: GGUFFile, prefix: str) -> dict[str, int]:
    """Read the sizes of the layers with states, and check that heads and groups divide each other evenly."""
    keys = ("group_count", "time_step_rank", "inner_size", "state_size", "conv_kernel")
    sizes = {key: file.get(f"{prefix}.{key}", int, minimum=1, maximum=MAX_SIZE) for key in keys}
    for key, divisor in (("time_step_rank", "group_count"), ("inner_size", "time_step_rank")):
        if sizes[key] % sizes[divisor]:
            raise GGUFFormatError(
                f"{file.path}: {prefix}.{key}: expected a multiple of {sizes[divisor]}, got {sizes[key]}"
            )
    return sizes
