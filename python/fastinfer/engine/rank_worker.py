"""The worker of a rank, which has a part of a model, with several steps in flight if there are several stages.

Ranks of a team have the same stage, a part of every weight each, and compute it together. A step passes through the
teams 1, 2, ... and then through team 0, which has the last stage: so the logits are where the sampler is, and hidden
states go in one direction only. Each step in flight has a slot in the memory that the ranks share: its inputs, and the
hidden states between two stages.

Rank 0 decides everything, and tells the others by messages. Each rank, rank 0 included, carries out all messages in
their order, each once the team before has done so.
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fastinfer.engine.batch_inputs import BatchInputs, StepResult
from fastinfer.engine.chunk import Chunk
from fastinfer.engine.config import EngineConfig
from fastinfer.engine.cuda_graphs import MAX_CAPTURED_TOKENS
from fastinfer.engine.halves import Halves
from fastinfer.engine.kv_cache_size import KVCacheSize
from fastinfer.engine.layer_costs import measure_layer_costs
from fastinfer.engine.logits_row import LogitsRow
from fastinfer.engine.shared_block import SharedBlock
from fastinfer.engine.worker import CachePart, Worker, adapter_ids_of
from fastinfer.errors import RequestError
from fastinfer.models import Model
from fastinfer.parallel.group import MAX_MESSAGES, Group, Team
from fastinfer.parallel.messages import Message
from fastinfer.parallel.nano_batches import split
from fastinfer.parallel.peer_group import PeerGroup
from fastinfer.parallel.second_team import on_team
from fastinfer.parallel.sharded_adapters import ShardedAdapterSlots
from fastinfer.parallel.stage import Stage

# Pairs of blocks in a message.
PAIRS_PER_MESSAGE = 1024


class _Done(NamedTuple):
    """A computed step, and its slot."""

    slot: int
    result: StepResult


class RankWorker(Worker):
    """Owns a rank's part of a model, and of the KV cache.

    Args:
        config: configuration of the engine.
        model: the part.
        size: size of the KV caches of all ranks together.
        with_adapters, separates_roles, drops_rows: see :class:`Worker`; the last is the same on all ranks.
        group: group of ranks. Each rank has a worker; those of ranks other than 0 only :meth:`follow`. On GPUs all
            ranks make their workers at the same time, as steps are recorded together.
        wait_until_loaded: function that waits until all other ranks have loaded their parts again; only for rank 0.
        load: function that loads the part again, and reports it to rank 0; only for other ranks.

    Attributes:
        num_slots: largest number of steps in flight, as many as stages.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: Stage,
        size: KVCacheSize,
        *,
        with_adapters: bool,
        separates_roles: bool,
        drops_rows: bool,
        group: Group,
        wait_until_loaded: Callable[[], None] | None = None,
        load: Callable[[], Stage] | None = None,
    ) -> None:
        self.num_slots = num_teams = group.size // group.team.size
        self._peers: list[PeerGroup] = []
        if config.device != "cpu":  # this rank's part of the model exchanges activations by the memory of all GPUs
            group.team.memory.copy_(self._connect(group, config.device).memory)
        super().__init__(
            config,
            model,
            size,
            with_adapters=with_adapters,
            separates_roles=separates_roles,
            allocate=group.allocate_inputs,
            num_slots=num_teams,
            layers=model.indices,
            drops_rows=drops_rows,
        )
        self._ranks = group
        team = group.rank // group.team.size
        self._before = group.team_ranks((team - 1) % num_teams) if num_teams > 1 and team != 1 else range(0)
        self._between = [self._share_hidden(model, inputs) for inputs in self._inputs] if num_teams > 1 else []
        self._hidden: list[Tensor | None] = [None] * num_teams  # of the last step in each slot
        self._next_slot = 0
        # Of rank 0: messages that it has not carried out itself yet, and steps that it has, but that nobody took yet.
        self._sent: deque[list[int]] = deque()
        self._done: deque[_Done] = deque()
        self._taken = 0  # slot of the step that was taken last
        own_bytes = super().part_bytes
        self._blocks = [SharedBlock(group, own_bytes(part)) for part in CachePart if config.has_offloading]
        self._wait_until_loaded, self._load = wait_until_loaded, load
        self._adapters = model.adapters
        if isinstance(self._adapters, ShardedAdapterSlots):
            self._adapters.send = self._send
        self._check_exchanges()  # those of the steps that were recorded
        if self._peers and self.num_failed_graphs:
            # A rank that pads a step where another one does not would exchange something else.
            raise RuntimeError("ranks on GPUs must record all steps as graphs: enforce_eager=True records none")
        self.runner.halves = self._make_halves(model)

    def run(self, chunks: list[Chunk], rows: list[LogitsRow], drawn: Tensor | None = None) -> StepResult:
        self.complete_all()  # what an interrupted step has left
        self.launch(chunks, rows, drawn)
        result = self.collect()
        self.report(chunks, result)
        return result

    def launch(self, chunks: list[Chunk], rows: list[LogitsRow], drawn: Tensor | None = None) -> None:
        """Let the other ranks begin a step, which :meth:`collect` completes; at most ``num_slots`` may be in flight.

        Args:
            chunks, rows, drawn: see :meth:`fastinfer.engine.runner.Runner.__call__`.

        Raises:
            RuntimeError: a rank has ended.
        """
        slot = self._next_slot
        runner = self._runners[slot]
        size, is_decode = runner.prepare(chunks, rows, drawn)
        self._send([Message.STEP, slot, *runner.description(size, is_decode)])
        self._next_slot = (slot + 1) % self.num_slots

    def collect(self) -> StepResult:
        """Complete the oldest step in flight, and return its result, which is valid until the next launch.

        Raises:
            RuntimeError: a rank has ended, or did not compute its part before the deadline.
        """
        while not self._done:
            self._carry_out_next()
        self._taken, result = self._done.popleft()
        return result

    def complete_all(self) -> None:
        """Carry out all messages, and drop the results of steps in flight, which are of no use any more."""
        self._carry_out_all()
        self._done.clear()

    def follow(self) -> None:
        """Wait for a message of rank 0 and for the team before, and carry it out; only for other ranks.

        Raises:
            RuntimeError: the group was aborted, or the ranks disagree.
        """
        self._carry_out(self._ranks.receive())
        self._ranks.finish()

    def copy_blocks(self, pairs: list[tuple[int, int]], group: int) -> None:
        """Copy blocks of a group of layers, on each rank between the steps that were launched before and after."""
        for begin in range(0, len(pairs), PAIRS_PER_MESSAGE):
            blocks = [block for pair in pairs[begin : begin + PAIRS_PER_MESSAGE] for block in pair]
            self._send([Message.COPY_BLOCKS, group, *blocks])

    def part_bytes(self, part: CachePart) -> int:
        return self._blocks[part].num_bytes

    def read_part(self, part: CachePart, index: int) -> Tensor:
        self._send([Message.READ_PART, part, index])
        self._carry_out_all()
        return self._blocks[part].memory.clone()

    def write_part(self, part: CachePart, index: int, data: Tensor) -> None:
        # Nobody reads the memory now: all other ranks had carried out the last such message before rank 0 did.
        self._blocks[part].memory.copy_(data)
        self._send([Message.WRITE_PART, part, index])
        self._carry_out_all()

    def release(self, *, with_model: bool) -> None:
        self._send([Message.RELEASE, with_model])
        self.complete_all()

    def reload(self, model: Model) -> None:
        super().reload(model)
        assert self._wait_until_loaded is not None
        self._send([Message.RELOAD])
        try:
            self._wait_until_loaded()  # which has no deadline
        except RequestError as error:  # the rank has ended, and with it the group
            raise RuntimeError(self._ranks.end_message(error)) from None
        self.complete_all()

    def restore(self) -> None:
        self._send([Message.RESTORE])
        self.complete_all()

    def _logits(self, hidden: Tensor, rows: Tensor, adapter: int) -> Tensor:
        whole = self._hidden[self._taken]
        if self._ranks.team.size == 1 or whole is None:
            return super()._logits(hidden, rows, adapter)
        # The rest of the team has the same hidden states of the whole step, of which these are consecutive rows. It may
        # have begun later steps, which come first.
        first = (hidden.data_ptr() - whole.data_ptr()) // (hidden.shape[1] * hidden.itemsize)
        self._send([Message.LOGITS, self._taken, first + int(rows[0]), len(rows), adapter])
        logits = self._carry_out_all()
        assert logits is not None
        return logits

    def _send(self, words: list[int]) -> None:
        """Send a message, once so many earlier ones are carried out that no other rank waits for this one to do so."""
        while len(self._sent) >= MAX_MESSAGES // 2:
            self._carry_out_next()
        with self._ranks.together():
            self._ranks.send(words)
            self._sent.append(words)

    def _carry_out_all(self) -> Tensor | None:
        """Carry out all messages that this rank has sent, and return what the last one asks for."""
        result = None
        while self._sent:
            result = self._carry_out_next()
        return result

    def _carry_out_next(self) -> Tensor | None:
        """Carry out the oldest message that this rank has sent, once its whole team does; return logits if it asks."""
        group = self._ranks
        with group.together():
            logits = self._carry_out(self._sent.popleft())
            for rank in group.team_ranks(0)[1:]:  # which may still read the inputs
                group.wait_for(rank)
            group.finish()
            return logits

    def _carry_out(self, words: list[int]) -> Tensor | None:
        kind, *words = words
        if kind == Message.ADAPTER:  # for which all ranks come together
            assert isinstance(self._adapters, ShardedAdapterSlots)
            self._adapters.follow(words)
            return None
        if kind == Message.RELOAD:  # which no rank waits for another one to do
            if self._load is not None:
                model = self._load()
                super().reload(model if self._adapters is None else model.with_adapters(self._adapters))
            return None
        for rank in self._before:
            self._ranks.wait_for(rank)
        if kind == Message.STEP:
            self._compute(*words)
            self._check_exchanges()
        elif kind == Message.COPY_BLOCKS:
            group, *blocks = words
            super().copy_blocks(list(zip(blocks[::2], blocks[1::2], strict=True)), group)
        elif kind == Message.READ_PART:
            part, index = words
            self._blocks[part].own.copy_(super().read_part(CachePart(part), index))
        elif kind == Message.WRITE_PART:
            part, index = words
            super().write_part(CachePart(part), index, self._blocks[part].own)
        elif kind == Message.RELEASE:
            self._hidden = [None] * self.num_slots
            super().release(with_model=bool(*words))
        elif kind == Message.RESTORE:
            super().restore()
        else:
            assert kind == Message.LOGITS
            return self._logits_of(*words)
        return None

    def _connect(self, group: Group, device: str) -> PeerGroup:
        """Allocate memory for exchanges between GPUs; all ranks call this together."""
        with group.together():
            peers = PeerGroup.connect(group, device)
        group.on_abort.append(peers.abort)
        self._peers.append(peers)
        return peers

    def _make_halves(self, model: Stage) -> Halves | None:
        """Prepare steps in halves; ``None`` if they cannot pay. On GPUs all ranks call this together.

        That is so on a CPU, with one sequence, and if all steps are recorded as graphs.
        """
        config = self._config
        is_recorded = not config.enforce_eager and config.max_num_batched_tokens <= MAX_CAPTURED_TOKENS
        if not self._peers or config.max_num_seqs == 1 or is_recorded:
            return None
        group = self._ranks
        team = Team(group.rank, group.size, self._connect(group, config.device).memory)
        costs = measure_layer_costs(model, self.kv_cache, self._size, config, group)
        self._check_exchanges()
        choose = partial(split, device=self.device.type, costs=costs)
        return Halves((model, on_team(model, team)), self.kv_cache, self.device, choose)

    def _check_exchanges(self) -> None:
        """Wait for the GPU if there is one, and check that its exchanges with others have succeeded.

        Raises:
            RuntimeError: one has not; the message has the cause.
        """
        if self._peers:
            with self._ranks.together():
                torch.cuda.current_stream().synchronize()
                for peers in self._peers:
                    peers.check()

    def _compute(self, slot: int, *description: int) -> None:
        """Compute the step in a slot, and leave its hidden states to the next stage."""
        result = self._runners[slot].follow(description)
        self._hidden[slot] = result.hidden
        if self._between and self._ranks.team.rank == 0:
            self._between[slot][: len(result.hidden)].copy_(result.hidden)
        if self._ranks.rank == 0:
            self._done.append(_Done(slot, result))

    def _logits_of(self, slot: int, first: int, count: int, adapter: int) -> Tensor | None:
        """Compute logits for rows of the last step in a slot; ``None`` if other ranks have the output layer."""
        hidden = self._hidden[slot]
        assert hidden is not None
        if self._ranks.rank >= self._ranks.team.size:
            return None
        rows = torch.arange(first, first + count, device=self.device)
        logits = self.model.logits(hidden, rows, adapter_ids_of(rows, adapter))
        self._check_exchanges()
        return logits

    def _share_hidden(self, model: Stage, inputs: BatchInputs) -> Tensor:
        """Allocate memory for the hidden states between two stages, and read them there unless the stage is the first.

        Returns:
            [max_tokens, hidden].
        """
        shape = inputs.max_tokens, model.config.hidden_size
        memory = self._ranks.allocate_inputs(shape[0] * shape[1] * model.dtype.itemsize)
        hidden = torch.from_numpy(memory).view(model.dtype).view(shape)
        if not model.is_first:
            inputs.hidden = hidden
        return hidden
