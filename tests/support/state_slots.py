"""Batches of sequences whose states lie in slots, and what holds for the operators on them: one token's result and
state do not depend on how the sequence is divided into steps, nor on what else is in the batch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from support.helpers import assert_bitwise, per_thread_count
from support.placement import EmulatedDevice


@dataclass(frozen=True)
class Slots:
    """A step's sequences: how many tokens each has, the slot it reads, and the slots that its tokens write."""

    lengths: list[int]
    reads: list[int]
    writes: list[list[int]]

    def tensors(self, device: str) -> tuple[Tensor, Tensor, Tensor]:
        """query_start, state_reads and state_writes."""
        starts = [sum(self.lengths[:i]) for i in range(len(self.lengths) + 1)]
        tokens = [slot for seq in self.writes for slot in seq]
        return tuple(torch.tensor(values, dtype=torch.int32, device=device) for values in (starts, self.reads, tokens))

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def count(self) -> int:
        """Slots, one of which nobody uses."""
        return 2 + max([*self.reads, *(slot for seq in self.writes for slot in seq)], default=0)


def last(length: int, slot: int) -> list[int]:
    """Writes of a sequence that stores its last state alone."""
    return [-1] * (length - 1) + [slot]


BATCHES = {
    "one token": Slots([1], [0], [[0]]),
    "one new token": Slots([1], [-1], [[3]]),
    "a prompt": Slots([37], [-1], [last(37, 0)]),
    "mixed": Slots([1, 19, 0, 1, 2, 33], [4, -1, -1, 2, 0, 6], [[4], last(19, 1), [], [3], [-1, 5], last(33, 6)]),
    "snapshots": Slots([20, 3], [0, 1], [[-1] * 4 + [2] + [-1] * 10 + [3, 0, -1, 4, 5], [6, 1, 7]]),
    "an early snapshot": Slots([30], [0], [[-1, 2, *last(28, 1)]]),
    "every token": Slots([18, 2], [1, -1], [[2, 1, *range(3, 19)], [19, 20]]),
    "a shared read": Slots([2, 1, 17], [0, 0, 0], [[-1, 1], [2], last(17, 3)]),
    "nothing stored": Slots([17, 1], [-1, 0], [[-1] * 17, [-1]]),
    "no tokens": Slots([0, 0], [0, -1], [[], []]),
    "no sequences": Slots([], [], []),
}


# run(tokens, state, query_start, state_reads, state_writes): an operator on these of the tokens that it was made with.
Run = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def poisoned(slots: Slots, state: Tensor, device: str) -> Tensor:
    """NaN wherever nobody may read."""
    read = [slot in slots.reads for slot in range(slots.count)]
    return torch.where(torch.tensor(read, device=device).view(-1, *[1] * (state.dim() - 1)), state, torch.nan)


def assert_kept(slots: Slots, state: Tensor, before: Tensor) -> None:
    """Slots that nobody writes are as before."""
    written = {slot for seq in slots.writes for slot in seq}
    kept = [slot for slot in range(slots.count) if slot not in written]
    assert kept
    assert_bitwise(state[kept], before[kept])


def assert_snapshots(slots: Slots, run: Run, state: Tensor, device: str) -> None:
    """Each result and each stored state is that of a step which ends there."""
    states, tokens = state.clone(), torch.arange(slots.tokens, device=device)
    out = run(tokens, states, *slots.tensors(device))
    starts = slots.tensors("cpu")[0].tolist()
    last_writers = {slot: (seq, i) for seq, writes in enumerate(slots.writes) for i, slot in enumerate(writes)}
    for slot, (seq, i) in last_writers.items():
        if slot < 0:
            continue
        alone, own = Slots([i + 1], [slots.reads[seq]], [last(i + 1, slot)]), state.clone()
        part = slice(starts[seq], starts[seq] + i + 1)
        assert_bitwise(run(tokens[part], own, *alone.tensors(device)), out[part])
        assert_bitwise(own[slot], states[slot])


def assert_cuts(tokens: int, run: Run, state: Tensor, device: str) -> None:
    """A sequence in steps, in place or from slot to slot, gives what it gives in one."""
    assert len(state) >= 3
    rows, whole = torch.arange(tokens, device=device), state.clone()
    out = run(rows, whole, *Slots([tokens], [0], [last(tokens, 1)]).tensors(device))
    for cuts in ([1], [15], [16], [17], [1, 2, 3, 4], [16, 32], [tokens - 1], list(range(1, tokens))):
        states, slot, parts = state.clone(), 0, []
        for i, (begin, end) in enumerate(pairwise([0, *cuts, tokens])):
            target = 1 if end == tokens else 2 if i % 3 else slot
            step = Slots([end - begin], [slot], [last(end - begin, target)])
            parts.append(run(rows[begin:end], states, *step.tensors(device)))
            slot = target
        assert_bitwise(torch.cat(parts), out)
        assert_bitwise(states[1], whole[1])


def assert_batch_and_threads(slots: Slots, run: Run, state: Tensor, device: str) -> None:
    """Sequences alone give what they give together, on one thread and on two."""
    tokens, states = torch.arange(slots.tokens, device=device), [state.clone() for _ in range(2)]
    results = iter(states)
    one, two = per_thread_count(lambda: run(tokens, next(results), *slots.tensors(device)))
    assert_bitwise(one, two)
    assert_bitwise(*states)
    start = 0
    for length, read, writes in zip(slots.lengths, slots.reads, slots.writes, strict=True):
        own, part = state.clone(), slice(start, start + length)
        alone = Slots([length], [read], [writes])
        assert_bitwise(run(tokens[part], own, *alone.tensors(device)), one[part])
        for slot in {*writes} - {-1}:
            assert_bitwise(own[slot], states[0][slot])
        start += length


def assert_no_other_slots(run: Run, state: Tensor, device: str) -> None:
    """The CPU refuses slots out of range; a GPU treats them like -1, also a state that a later token stores again.

    Args:
        run: operator on 9 tokens.
        state: [slots, ...] memory, of which the operator gets the first three slots.
        device: where it runs.
    """
    tokens, memory, expected = torch.arange(9, device=device), state.clone(), state.clone()
    beyond = Slots([9], [4], [[*[-1] * 6, 1, 3, 4]])
    if device == "cpu" and not isinstance(device, EmulatedDevice):
        with pytest.raises(RuntimeError, match=r"state_reads\[0\] must be in -1..2, got 4"):
            run(tokens, memory[:3], *beyond.tensors(device))
        return
    none = Slots([9], [-1], [[*[-1] * 6, 1, -1, -1]])
    outputs = [run(tokens, memory[:3], *beyond.tensors(device)), run(tokens, expected[:3], *none.tensors(device))]
    assert_bitwise(*outputs)
    assert_bitwise(memory, expected)
