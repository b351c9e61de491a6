"""Metadata of an image encoder in a GGUF file.

Keys and names of tensors: https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/constants.py.
"""

from dataclasses import dataclass

import numpy as np

from fastinfer.errors import GGUFFormatError
from fastinfer.formats.gguf import GGUFFile
from fastinfer.models.config import MAX_LAYERS, MAX_SIZE


@dataclass(frozen=True)
class MmprojFields:
    """Sizes and constants that all image encoders have.

    Attributes:
        num_layers, width, num_heads: numbers of layers, of elements of a patch's row, and of heads.
        patch_size, image_size: sides of a patch and of an image, in pixels.
        norm_eps: epsilon of the norms.
        mean, std: mean and standard deviation of red, green and blue, by which pixels are normalised.
    """

    num_layers: int
    width: int
    num_heads: int
    patch_size: int
    image_size: int
    norm_eps: float
    mean: list[float]
    std: list[float]


def read_fields(file: GGUFFile) -> MmprojFields:
    """Read the metadata.

    Raises:
        GGUFFormatError: a key is missing, or its value is out of range.
    """
    fields = MmprojFields(
        num_layers=file.get("clip.vision.block_count", int, minimum=1, maximum=MAX_LAYERS),
        width=size(file, "embedding_length"),
        num_heads=size(file, "attention.head_count"),
        patch_size=size(file, "patch_size"),
        image_size=size(file, "image_size"),
        norm_eps=file.get("clip.vision.attention.layer_norm_epsilon", float, minimum=0.0, maximum=1.0),
        mean=_colors(file, "image_mean"),
        std=_colors(file, "image_std", minimum=1e-6),  # pixels are divided by it
    )
    if fields.width % fields.num_heads:
        raise GGUFFormatError(
            f"{file.path}: clip.vision.embedding_length must be a multiple of {fields.num_heads} heads, "
            f"got {fields.width}"
        )
    return fields


def size(file: GGUFFile, key: str, default: int | None = None) -> int:
    """Read a size of at least 1."""
    name = f"clip.vision.{key}"
    if default is None:
        return file.get(name, int, minimum=1, maximum=MAX_SIZE)
    return file.get(name, int, default, minimum=1, maximum=MAX_SIZE)


def _colors(file: GGUFFile, key: str, minimum: float = -1e6) -> list[float]:
    """Read a number for each of red, green and blue."""
    name = f"clip.vision.{key}"
    values = file.get(name, np.ndarray)
    if values.dtype.kind != "f" or len(values) != 3 or not ((values >= minimum) & (values <= 1e6)).all():
        limits = f"three numbers of {minimum:g} to 1e+06"
        raise GGUFFormatError(f"{file.path}: metadata key {name!r}: expected {limits}, got {values!s:.80}")
    return [float(value) for value in values]
