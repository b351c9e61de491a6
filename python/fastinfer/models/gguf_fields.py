"""Checks that the readers of a GGUF file's metadata share."""

import numpy as np

from fastinfer.errors import GGUFFormatError
from fastinfer.formats.gguf import GGUFFile
from fastinfer.models.config import MAX_LAYERS, MAX_SIZE


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


def check_length(file: GGUFFile, architecture: str, key: str, values: np.ndarray) -> None:
    """Refuse a list that does not have a value for each layer."""
    count = file.get(f"{architecture}.block_count", int, minimum=1, maximum=MAX_LAYERS)
    if len(values) != count:
        raise GGUFFormatError(
            f"{file.path}: {architecture}.{key}: expected {count} values, one for each layer, got {len(values)}"
        )
