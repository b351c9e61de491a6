"""Refusal of models that tensor parallelism does not support, before any weight is read."""

from fastinfer.errors import UnsupportedModelError
from fastinfer.models.checkpoint import Checkpoint
from fastinfer.models.config import ModelConfig
from fastinfer.models.image_encoder import FAMILIES
from fastinfer.parallel.division import Division


def check_divisible(checkpoint: Checkpoint, size: int) -> None:
    """Check that a model can be divided among ranks.

    Args:
        checkpoint: an open checkpoint.
        size: number of ranks.

    Raises:
        UnsupportedModelError: the model has parts that are not divided yet.
        RequestError: there are more ranks than units.
    """
    part = _undivided_part(checkpoint.config)
    if part is not None:
        raise UnsupportedModelError(
            f"{checkpoint.path}: tensor_parallel_size must be 1 for a model with {part}, got {size}"
        )
    Division(checkpoint.config, 0, size).check()


def _undivided_part(config: ModelConfig) -> str | None:
    """Return the first part of a model that cannot be divided."""
    parts = {
        "a reduced vocabulary": bool(config.draft_vocab_size),
        "images": config.architecture in FAMILIES,
    }
    return next((part for part, has_it in parts.items() if has_it), None)
