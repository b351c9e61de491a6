"""A worker that has a stage of a model, with several steps in flight.

A step passes through the ranks 1, 2, ... and then through rank 0, which has the last stage: so the logits are where the
sampler is, and hidden states go in one direction only. Each step in flight has a slot in the memory that the ranks
share: its inputs, and the hidden states between two stages. Each rank carries out rank 0's messages in their order, and
a step once the rank before it has done so.
"""

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fastinfer.engine.batch_inputs import BatchSize, StepResult
from fastinfer.engine.chunk import Chunk
from fastinfer.engine.config import EngineConfig
from fastinfer.engine.kv_cache_size import KVCacheSize
from fastinfer.engine.logits_row import LogitsRow
from fastinfer.engine.runner import STEP, Runner
from fastinfer.engine.worker import COPY_BLOCKS, Worker, copied_pairs, copy_messages
from fastinfer.parallel.group import Group
from fastinfer.parallel.stage import Stage


@dataclass(frozen=True)
class _Slot:
    """Memory of one step in flight.

    Attributes:
        runner: runner whose inputs are in shared memory.
        hidden: [max_tokens, hidden] hidden states between two stages, in shared memory.
    """

    runner: Runner
    hidden: Tensor


class _Copies(NamedTuple):
    """Pairs of blocks to be copied, in a group of layers."""

    group: int
    pairs: list[tuple[int, int]]


class _SentStep(NamedTuple):
    """A step whose inputs are in a slot, with the arguments of :meth:`Runner.run`."""

    slot: _Slot
    size: BatchSize
    is_decode: bool


class StageWorker(Worker):
    """Owns a stage of a model, and the KV cache of its layers.

    Args:
        config: configuration of the engine.
        model: the stage.
        size: size of the KV caches of all stages together.
        separates_roles: see :class:`Worker`.
        group: group of ranks, as many as stages. Each rank has a worker; those of ranks other than 0 only
            :meth:`follow`.

    Attributes:
        num_slots: largest number of steps in flight.
    """

    def __init__(
        self, config: EngineConfig, model: Stage, size: KVCacheSize, *, separates_roles: bool, group: Group
    ) -> None:
        super().__init__(
            config,
            model,
            size,
            separates_roles=separates_roles,
            allocate=group.allocate_inputs,
            layers=model.indices,
        )
        self._stage = model
        self._ranks = group
        self.num_slots = group.size
        runners = [self.runner, *(self._make_runner() for _ in range(1, self.num_slots))]
        self._slots = [self._make_slot(runner) for runner in runners]
        self._next_slot = 0
        self._sent: deque[_Copies | _SentStep] = deque()  # what rank 0 has not carried out itself yet

    @property
    def num_eager_steps(self) -> int:
        """Number of steps that ran operator by operator since the start."""
        return sum(slot.runner.num_eager_steps for slot in self._slots)

    @property
    def num_failed_graphs(self) -> int:
        """Number of steps that could not be recorded as a graph."""
        return sum(len(slot.runner.graphs.failed) for slot in self._slots if slot.runner.graphs)

    def launch(self, chunks: list[Chunk], rows: list[LogitsRow]) -> None:
        """Let the other ranks begin a step, which :meth:`collect` completes; at most ``num_slots`` may be in flight.

        Args:
            chunks: the step's chunks, without tokens that are not known yet.
            rows: their rows of logits.

        Raises:
            RuntimeError: a rank has ended.
        """
        number = self._next_slot
        slot = self._slots[number]
        size, is_decode = slot.runner.prepare(chunks, rows)
        with self._ranks.together():
            self._ranks.send([STEP, number, *slot.runner.description(size, is_decode)])
            self._sent.append(_SentStep(slot, size, is_decode))
            self._next_slot = (number + 1) % self.num_slots

    def collect(self) -> StepResult:
        """Complete the oldest step in flight, and return its result, which is valid until the next launch.

        Raises:
            RuntimeError: a rank has ended, or did not compute its stage before the deadline.
        """
        result = None
        while result is None:
            result = self._carry_out()
        return result

    def complete_all(self) -> None:
        """Complete all steps in flight, whose results are of no use any more."""
        while self._sent:
            self._carry_out()

    def follow(self) -> None:
        """Wait for a message of rank 0 and for the stage before, and carry it out; only for other ranks.

        Raises:
            RuntimeError: the group was aborted, or the inputs are not those of the message.
        """
        group = self._ranks
        kind, first, *words = group.receive()
        if group.rank > 1:
            group.wait_for(group.rank - 1)
        if kind == COPY_BLOCKS:
            self.kv_cache.copy_blocks(copied_pairs(words), first)
        else:
            slot = self._slots[first]
            hidden = slot.runner.follow(words).hidden
            slot.hidden[: len(hidden)].copy_(hidden)
        group.finish()

    def copy_blocks(self, pairs: list[tuple[int, int]], group: int) -> None:
        """Copy blocks of a group of layers, on each rank between the steps that were launched before and after."""
        for message in copy_messages(pairs, group):
            with self._ranks.together():
                self._ranks.send(message)
                self._sent.append(_Copies(group, copied_pairs(message[2:])))

    def _carry_out(self) -> StepResult | None:
        """Carry out the oldest message that rank 0 has sent, and return the result if it is a step."""
        with self._ranks.together():
            entry, result = self._sent.popleft(), None
            self._ranks.wait_for(self._ranks.size - 1)
            if isinstance(entry, _Copies):
                self.kv_cache.copy_blocks(entry.pairs, entry.group)
            else:
                result = entry.slot.runner.run(entry.size, entry.is_decode)
            self._ranks.finish()
            return result

    def _make_slot(self, runner: Runner) -> _Slot:
        model, inputs = self._stage, runner.inputs
        shape = inputs.max_tokens, model.config.hidden_size
        memory = self._ranks.allocate_inputs(shape[0] * shape[1] * model.dtype.itemsize)
        hidden = torch.from_numpy(memory).view(model.dtype).view(shape)
        if not model.is_first:
            inputs.hidden = hidden
        return _Slot(runner, hidden)
