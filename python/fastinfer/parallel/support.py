"""Refusal of models that ranks cannot divide, before any weight is read."""

from collections.abc import Sequence

import torch

from fastinfer import _C
from fastinfer.errors import RequestError, UnsupportedModelError
from fastinfer.models.checkpoint import Checkpoint
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
    refuse_parts(checkpoint, "tensor_parallel_size", size)
    Division(checkpoint.config, 0, size, layout).check()


def check_gpus(devices: Sequence[str]) -> None:
    """Check that there is a GPU for each rank.

    Args:
        devices: ``"cuda:N"`` for each rank, with consecutive numbers.

    Raises:
        RequestError: there is not, or there are more ranks than an exchange may have.
    """
    count = torch.cuda.device_count()
    if len(devices) > _C.MAX_PEERS:
        raise RequestError(f"tensor_parallel_size must be at most {_C.MAX_PEERS} on GPUs, got {len(devices)}")
    if torch.device(devices[-1]).index >= count:
        raise RequestError(
            f"tensor_parallel_size={len(devices)} needs the GPUs {devices[0]} to {devices[-1]}, got {count} in all"
        )


def refuse_parts(checkpoint: Checkpoint, option: str, size: int) -> None:
    """Check that a model has no parts that are not divided yet.

    Args:
        checkpoint: an open checkpoint.
        option, size: name and value of the option that divides the model.

    Raises:
        UnsupportedModelError: it has one.
    """
    if checkpoint.config.draft_vocab_size:
        raise UnsupportedModelError(
            f"{checkpoint.path}: {option} must be 1 for a model with a reduced vocabulary, got {size}"
        )
