"""Toy models with states: the hash of the text is also kept in slots, and must be the one that the KV cache gives."""

from itertools import pairwise

import torch
from torch import Tensor

from fastinfer.models.batch import Batch
from fastinfer.models.kv_cache import KVCache
from fastinfer.models.state_cache import StateCache
from fastinfer.models.state_config import LinearAttentionConfig
from support.toy import NUM_LAYERS, RoleToy, ToyConfig, ToyModel, extended

EMPTY = 17  # the hash of no tokens
DIGIT = 2**16  # fp32 holds such digits of a hash exactly


class StateToy(ToyModel):
    """A toy with one more layer, whose state after a token is the hash of the text up to it."""

    def __init__(self, windows: tuple[int, ...] = (0,) * NUM_LAYERS) -> None:
        super().__init__(windows)
        self.config = ToyConfig(
            (*windows, 0),
            num_layers=len(windows) + 1,
            states=LinearAttentionConfig(1, 1, 1, 4, 2),
            state_layers=(*[False] * len(windows), True),
        )

    def forward(self, batch: Batch, kv_cache: KVCache) -> Tensor:
        found = super().forward(batch, kv_cache)
        (states,) = (cache for cache in kv_cache if isinstance(cache, StateCache))
        assert batch.state_reads is not None
        assert batch.state_writes is not None
        tokens, reads, writes = self._stored(batch).tolist(), batch.state_reads.tolist(), batch.state_writes.tolist()
        starts = batch.query_start.tolist()
        check_slots(starts, reads, writes)
        hashes: list[int] = []
        for row, (start, end) in enumerate(pairwise(starts)):
            value = EMPTY if reads[row] < 0 else _load(states, reads[row])
            for token, slot in zip(tokens[start:end], writes[start:end], strict=True):
                value = extended(value, token)
                hashes.append(value)
                if slot >= 0:
                    _store(states, slot, value)
        if 0 in self.windows:
            assert found[:, 0].tolist() == hashes
        return torch.tensor(hashes)[:, None]


class StateRoleToy(StateToy, RoleToy):
    """The same for kernels that compute prompts differently."""


def check_slots(starts: list[int], reads: list[int], writes: list[int]) -> None:
    """No sequence may write what another reads or writes, or write a slot twice; the last token's is always stored."""
    owners: dict[int, int] = {}
    for row, (start, end) in enumerate(pairwise(starts)):
        own = [slot for slot in writes[start:end] if slot >= 0]
        assert len(own) == len(set(own))
        assert start == end or writes[end - 1] >= 0
        for slot in own:
            assert owners.setdefault(slot, row) == row
    for row, slot in enumerate(reads):
        assert owners.get(slot, row) == row


def _load(states: StateCache, slot: int) -> int:
    digits = states.recurrent[slot].flatten().tolist()
    return sum(int(digit) * DIGIT**place for place, digit in enumerate(digits))


def _store(states: StateCache, slot: int, value: int) -> None:
    digits = [value // DIGIT**place % DIGIT for place in range(4)]
    states.recurrent[slot].view(-1)[:] = torch.tensor(digits, dtype=torch.float32)
