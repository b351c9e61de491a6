"""Checks that the readers of a GGUF file's metadata share."""

import numpy as np

from fastinfer.errors import GGUFFormatError, UnsupportedModelError
from fastinfer.formats.gguf import GGUFFile
from fastinfer.models.config import MAX_LAYERS, MAX_SIZE, ModelConfig
from fastinfer.models.layer_values import with_swiglu_limits


def sizes_by_layer(file: GGUFFile, architecture: str, key: str, minimum: int = 1) -> list[int]:
    """Return a size of each of the file's layers, which it may give once for all.

    Raises:
        GGUFFormatError: the key is missing, has another number of values, or one of them is out of range.
    """
    name = f"{architecture}.{key}"
    value = file.metadata.get(name)
    if not isinstance(value, np.ndarray):
        size = file.get(name, int, minimum=minimum, maximum=MAX_SIZE)
        return [size] * file.get(f"{architecture}.block_count", int, minimum=1, maximum=MAX_LAYERS)
    check_length(file, architecture, key, value)
    if value.dtype.kind not in "iu" or not ((value >= minimum) & (value <= MAX_SIZE)).all():
        raise GGUFFormatError(f"{file.path}: {name}: expected sizes from {minimum}, got {value.tolist()!r:.80}")
    return [int(size) for size in value]


def same_size(file: GGUFFile, architecture: str, key: str) -> int:
    """Return a size that the file gives for each layer, but that must be the same in all of them.

    Raises:
        GGUFFormatError: the number of values is another one, or one of them is out of range.
        UnsupportedModelError: the sizes differ.
    """
    sizes = sizes_by_layer(file, architecture, key)
    if len(set(sizes)) > 1:
        raise UnsupportedModelError(
            f"{file.path}: {architecture}.{key} must be the same for all layers, got {sizes!r:.80}"
        )
    return sizes[0]


def head_sizes(file: GGUFFile) -> dict[str, int]:
    """Return the largest number of query heads, which differ by layer, and the number of KV heads, by their keys.

    Raises:
        UnsupportedModelError: the numbers of KV heads differ.
    """
    architecture = file.get("general.architecture", str)
    heads, kv_heads = "attention.head_count", "attention.head_count_kv"
    # The largest one: the first check of these is that of their divisor.
    return {
        heads: max(sizes_by_layer(file, architecture, heads)),
        kv_heads: same_size(file, architecture, kv_heads),
    }


def flags_by_layer(file: GGUFFile, architecture: str, key: str) -> list[bool]:
    """Return a flag of each of the file's layers.

    Raises:
        GGUFFormatError: the key is missing, or has another number of values.
    """
    flags = file.get(f"{architecture}.{key}", np.ndarray)
    check_length(file, architecture, key, flags)
    return [bool(flag) for flag in flags.tolist()]


def windows_by_layer(file: GGUFFile, architecture: str) -> tuple[int, ...]:
    """Return the length of each layer's attention window in positions, 0 for none, from a list of those that have one.

    Raises:
        GGUFFormatError: a key is missing, has another number of values, or is out of range.
    """
    window = file.get(f"{architecture}.attention.sliding_window", int, minimum=1, maximum=MAX_SIZE)
    flags = flags_by_layer(file, architecture, "attention.sliding_window_pattern")
    return tuple(window if flag else 0 for flag in flags)


def with_swiglu_clamps(file: GGUFFile, config: ModelConfig) -> ModelConfig:
    """Return the configuration with the limits of SwiGLU in each layer.

    Raises:
        GGUFFormatError: a list has another number of values, or one of them is negative.
    """
    return with_swiglu_limits(config, *(_clamps(file, config, f"swiglu_clamp_{part}") for part in ("exp", "shexp")))


def _clamps(file: GGUFFile, config: ModelConfig, key: str) -> tuple[float, ...]:
    """Return the limit of each layer, 0 for none."""
    name = f"{config.architecture}.{key}"
    values = file.metadata.get(name)
    if not isinstance(values, np.ndarray):  # one for all layers, or none
        return (file.get(name, float, 0.0, minimum=0.0, maximum=1e30),) * config.num_layers
    check_length(file, config.architecture, key, values)
    if values.dtype.kind != "f" or not ((values >= 0) & (values < 1e30)).all():
        raise GGUFFormatError(f"{file.path}: {name}: expected numbers from 0, got {values.tolist()!r:.80}")
    return tuple(float(limit) for limit in values[: config.num_layers])


def xielu_parameter(file: GGUFFile, name: str, layer: int, num_layers: int) -> float:
    """Return a factor of a layer's xIELU, by its name in :data:`fastinfer.models.checkpoint.XIELU_PARAMETERS`.

    Raises:
        GGUFFormatError: the key is missing, or has another number of values than one for all layers or for each.
    """
    key = name.replace("_", ".", 1)
    values = file.metadata.get(key)
    if not isinstance(values, np.ndarray):
        return file.get(key, float)
    if len(values) != num_layers or values.dtype.kind != "f":
        raise GGUFFormatError(
            f"{file.path}: {key}: expected {num_layers} numbers, one for each layer, got {values.tolist()!r:.80}"
        )
    return float(values[layer])


def check_length(file: GGUFFile, architecture: str, key: str, values: np.ndarray) -> None:
    """Refuse a list that does not have a value for each layer; it may leave out those of multi-token prediction."""
    count = file.get(f"{architecture}.block_count", int, minimum=1, maximum=MAX_LAYERS)
    drafting = file.get(f"{architecture}.nextn_predict_layers", int, 0, minimum=0)
    if len(values) not in (count, count - drafting):
        raise GGUFFormatError(
            f"{file.path}: {architecture}.{key}: expected {count} values, one for each layer, got {len(values)}"
        )
