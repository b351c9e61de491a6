"""Layers that have a state instead of keys and values, from the metadata of a GGUF file."""

import numpy as np

from fastinfer.errors import GGUFFormatError, UnsupportedModelError
from fastinfer.formats.gguf import GGUFFile
from fastinfer.models.config import MAX_SIZE
from fastinfer.models.gguf_architectures import ARCHITECTURES
from fastinfer.models.state_config import LinearAttentionConfig, Mamba2Config, ShortConvConfig, StateConfig


def state_layers(file: GGUFFile, architecture: str, num_layers: int) -> tuple[tuple[bool, ...], int]:
    """Return which layers have a state instead of keys and values, and the number of key and value heads of the others.

    Files with short convolutions or Mamba-2 have a number of heads for each layer, which is 0 for a layer with a state.
    For other architectures the number is 0, and the result is empty without linear attention.
    """
    structure = ARCHITECTURES[architecture].structure
    if not structure.short_convs and not structure.mamba2:
        return _linear_layers(file, architecture, num_layers), 0
    key = f"{architecture}.attention.head_count_kv"
    counts = file.get(key, np.ndarray)
    values = {int(count) for count in counts if count}
    if structure.mamba2 and len(values) == 1 and counts.tolist() == [*values] * num_layers:
        return (), values.pop()
    if len(counts) != num_layers or len(values) != 1 or not 0 < min(values) <= MAX_SIZE or all(counts):
        raise GGUFFormatError(
            f"{file.path}: metadata key {key!r}: expected {num_layers} numbers, some 0 and the others equal, "
            f"got {counts.tolist()!r:.80}"
        )
    return tuple(not count for count in counts), values.pop()


def _linear_layers(file: GGUFFile, architecture: str, num_layers: int) -> tuple[bool, ...]:
    """Return whether each layer has linear attention; empty for an architecture without such layers."""
    period = ARCHITECTURES[architecture].structure.linear_period
    if not period:
        return ()
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
    if not structure.short_convs:
        return _linear_attention(file, architecture)
    key = f"{architecture}.shortconv.l_cache"
    return ShortConvConfig(hidden_size, file.get(key, int, minimum=2, maximum=4))


def _linear_attention(file: GGUFFile, architecture: str) -> LinearAttentionConfig:
    """Return the sizes of the layers with linear attention, which must be those that the operators support."""
    prefix = f"{architecture}.ssm"

    def size(key: str) -> int:
        return file.get(f"{prefix}.{key}", int, minimum=1, maximum=MAX_SIZE)

    key_heads, value_heads, inner = size("group_count"), size("time_step_rank"), size("inner_size")
    for key, value, factor in (("time_step_rank", value_heads, key_heads), ("inner_size", inner, value_heads)):
        if value % factor:
            raise GGUFFormatError(f"{file.path}: {prefix}.{key}: expected a multiple of {factor}, got {value}")
    sizes = LinearAttentionConfig(
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_dim=size("state_size"),
        value_dim=inner // value_heads,
        kernel_size=size("conv_kernel"),
        tiled_output=ARCHITECTURES[architecture].tiled_values and value_heads > key_heads,
    )
    value_dim = f"{prefix}.inner_size / {prefix}.time_step_rank"
    if problem := sizes.unsupported(f"{prefix}.state_size", value_dim, f"{prefix}.conv_kernel"):
        raise UnsupportedModelError(f"{file.path}: {problem}")
    return sizes


def _mamba2(file: GGUFFile, architecture: str) -> Mamba2Config:
    """Return the sizes of the Mamba-2 layers, which must be those that the operators support."""
    prefix = f"{architecture}.ssm"

    def size(key: str) -> int:
        return file.get(f"{prefix}.{key}", int, minimum=1, maximum=MAX_SIZE)

    heads, inner, groups = size("time_step_rank"), size("inner_size"), size("group_count")
    for key, value, factor in (("time_step_rank", heads, groups), ("inner_size", inner, heads)):
        if value % factor:
            raise GGUFFormatError(f"{file.path}: {prefix}.{key}: expected a multiple of {factor}, got {value}")
    has_conv_bias = any(name.endswith(".ssm_conv1d.bias") for name in file.tensors)
    sizes = Mamba2Config(heads, inner // heads, size("state_size"), groups, size("conv_kernel"), has_conv_bias)
    head_dim = f"{prefix}.inner_size / {prefix}.time_step_rank"
    if problem := sizes.unsupported(head_dim, f"{prefix}.state_size", f"{prefix}.conv_kernel"):
        raise UnsupportedModelError(f"{file.path}: {problem}")
    return sizes
