"""Refusal of models that ranks cannot divide, before any weight is read."""

from collections.abc import Mapping

from fastinfer.errors import UnsupportedModelError
from fastinfer.models.checkpoint import Checkpoint
from fastinfer.models.image_encoder import FAMILIES
from fastinfer.parallel.division import Division, Layout


def check_divisible(checkpoint: Checkpoint, size: int, layout: Layout = "gather") -> None:
    """Check that a model can be divided among ranks.

    Args:
        checkpoint: an open checkpoint.
        size: number of ranks.
        layout: see :mod:`fastinfer.parallel.division`.

    Raises:
        UnsupportedModelError: the model has parts that are not divided yet.
        RequestError: there are more ranks than units.
    """
    config = checkpoint.config
    parts = {"a reduced vocabulary": bool(config.draft_vocab_size), "images": config.architecture in FAMILIES}
    refuse_parts(checkpoint, "tensor_parallel_size", size, parts)
    Division(config, 0, size, layout).check()


def refuse_parts(checkpoint: Checkpoint, option: str, size: int, parts: Mapping[str, bool]) -> None:
    """Check that a model has none of some parts.

    Args:
        checkpoint: an open checkpoint.
        option, size: name and value of the option that does not support them.
        parts: for the name of each part, whether the model has it.

    Raises:
        UnsupportedModelError: it has one.
    """
    part = next((part for part, has_it in parts.items() if has_it), None)
    if part is not None:
        raise UnsupportedModelError(f"{checkpoint.path}: {option} must be 1 for a model with {part}, got {size}")
