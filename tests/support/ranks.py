"""Ranks of a group in the threads of one process, for tests without processes."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from fastinfer.models import Model
from fastinfer.models.batch import Batch
from fastinfer.models.kv_cache import KVCache
from fastinfer.parallel.group import Group

R = TypeVar("R")


def in_ranks(size: int, run: Callable[[Group], R], deadline: float = 60.0, team_size: int | None = None) -> list[R]:
    """What a function returns in each rank of a new group."""
    first = Group.create(size, deadline, team_size=team_size)
    groups = [first, *(Group(rank, size, *first.fds, team_size=team_size) for rank in range(1, size))]
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, groups))


def logits_of_texts(model: Model, texts: list[list[int]], block_size: int = 16) -> tuple[Tensor, Tensor]:
    """Hidden states and logits of all tokens of some texts."""
    batch = Batch.of_texts(texts, block_size)
    num_blocks = sum(-(-len(text) // block_size) for text in texts)
    cache = KVCache.of_model(model.config, [num_blocks], block_size, torch.float32, "cpu", state_dtype=model.dtype)
    hidden = model.forward(batch, cache)
    return hidden, model.logits(hidden, torch.arange(len(hidden)))
