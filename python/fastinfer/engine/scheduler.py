"""The scheduler, which chooses the tokens that the next step computes."""

import bisect
import heapq
import itertools
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from fastinfer.engine.block_manager import BlockManager
from fastinfer.engine.chunk import Chunk
from fastinfer.engine.sequence import Sequence, SequenceState

# Decoding sequences leave one token in this many to prompts.
PROMPT_SHARE = 4
# Waiting sequences, from the first on, that a step considers. More would delay steps while the queue is long: 64
# without room take 0.13 ms.
LOOKAHEAD = 64


class Scheduler:
    """Chooses what each step computes, within limits on tokens and sequences.

    The order of service is by priority, the smallest number first, and then by arrival. When the cache is full, the
    last running sequence in this order is preempted: it loses its blocks, returns to its place in the queue, and is
    computed again later. The first one always makes progress: it is preempted last, and the engine ensures that the
    cache holds at least one sequence of the maximum length.

    **Tokens.** Decoding sequences come first, with one token each before any has several (drafts, or tokens forced by a
    grammar). While there are prompts to compute, a quarter of the budget is reserved for them. If there are more
    decoding sequences than tokens, those of the same priority take turns.

    The prompts get the rest. Half of it is given out in the order of service; the other half, and what is left of the
    first, to the prompts of the smallest priority number, those with the fewest uncomputed tokens first. A prompt
    longer than the budget is thus computed in chunks, alone with the whole budget, but with half of it while shorter
    ones of its priority wait; and of equal prompts the later one waits and finds in the prefix cache what they share.

    **Room.** A waiting sequence is admitted when it gets its first tokens. If it then lacks slots or blocks, less
    urgent prompts that are still being computed give theirs up, and are computed again later. If that is not enough,
    later sequences of the same priority may overtake it, but no more than ``max_num_seqs`` in all, and none if it has
    generated tokens already, as after a preemption: the running sequences then end one by one until it has room.

    **Loading.** The blocks of an admitted prompt that are in a store beyond the cache are loaded first, by the block
    manager, and the prompt computes nothing until then. A step loads at most as many tokens as it may compute.

    **Modules.** A chunk of a prompt with modules has tokens that see the same blocks, see
    :class:`fastinfer.engine.prompt_layout.PromptLayout`: such a prompt takes a step for each of its spans at least.

    **Roles.** If the kernels compute prompts differently than generated tokens, a chunk has tokens of one role alone: a
    preempted sequence computes its prompt first, and its generated tokens in later steps. The chunks with generated
    tokens then come before the others.

    **Bounds.** They count steps, for a budget of ``B`` tokens, and hold for any lengths and arrivals, if
    nothing is loaded, no prompt has modules, one step is computed at a time, and roles are not separated, which costs a
    preempted sequence one step more.

    - With enough slots and blocks, and at most ``LOOKAHEAD`` waiting sequences, a prompt of ``L`` tokens is complete
      after at most ``ceil((8 W + 7) / B)`` steps, where ``W`` is the smaller of two sums: ``L`` and the uncomputed
      tokens of all prompts before it in the order of service; or ``L``, the uncomputed tokens of more urgent prompts,
      and at most ``L`` of every other prompt of its priority. The second does not depend on how long the longer prompts
      are. (Prompts get a quarter of the tokens, and half of that goes to the prompts of either sum. Where decoding
      sequences leave more to them, it takes less.)
    - Among ``D`` decoding sequences of one priority each gets a token at least every ``ceil((4 D + 3) / (3 B))`` steps.
    - A sequence without room waits until those that ran when its turn came, and at most ``max_num_seqs`` others of its
      priority, have ended.

    Args:
        block_manager: allocator of the sequences' blocks.
        max_num_seqs: maximum number of running sequences.
        max_num_batched_tokens: maximum number of tokens in a step, drafts included.
        separates_roles: whether to separate tokens of prompts from generated ones, see
            :mod:`fastinfer.engine.roles`.
        chunk_multiple: the chunks of a prompt end at a multiple of this number, but for the last one. It is at most
            an eighth of ``max_num_batched_tokens``, so that a prompt always gets a chunk.
        num_in_flight: number of steps that are computed at the same time. If there are several, the decoding sequences
            are divided evenly among them, and one whose last token is not known yet is left out.
        clock: function that returns the time in seconds; a simulation has a clock of its own.

    Attributes:
        separates_roles: see above.
        waiting: queue of waiting sequences in the order of service.
        num_waiting_tokens: number of tokens that the waiting sequences had when they were queued.
        running: running sequences in the order of service.
        num_preemptions: number of preemptions since the start.
        num_overtakings: number of sequences that were admitted before one that had no room.
        num_postponed_decodes: number of times that a decoding sequence got no token in a step, for lack of budget.
        num_cut_drafts: number of drafts that the speculator asked for and a step had no tokens or blocks for.
        num_queued_forks: number of forked sequences that found no slot and had to wait instead of sharing the blocks of
            their parent.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        *,
        separates_roles: bool = False,
        chunk_multiple: int = 1,
        num_in_flight: int = 1,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.block_manager = block_manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: list[Sequence] = []
        self.num_waiting_tokens = 0
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.num_overtakings = 0
        self.num_postponed_decodes = 0
        self.num_cut_drafts = 0
        self.num_queued_forks = 0
        self.separates_roles = separates_roles
        self._chunk_multiple = chunk_multiple
        self._num_in_flight = num_in_flight
        self._clock = clock
        self._num_steps = 0
        # What is left of a division is counted in the next step, so that the shares are exact for any small budget.
        self._unreserved = 0
        self._undivided = 0

    def add(self, sequence: Sequence) -> None:
        """Queue a pending or preempted sequence."""
        sequence.state = SequenceState.WAITING
        bisect.insort(self.waiting, sequence, key=_order)
        sequence.num_queued_tokens = len(sequence)
        self.num_waiting_tokens += len(sequence)

    def schedule(self, *, is_ahead: bool = False) -> list[Chunk]:
        """Return the chunks of the next step, with their blocks allocated; empty if nothing can be computed now.

        Args:
            is_ahead: whether the results of earlier steps are not known yet, so that there may be more to compute once
                they are.
        """
        chunks: list[Chunk] = []
        self._num_steps += 1
        self.block_manager.begin_step()
        budget, reserved, num_preemptions = self.max_num_batched_tokens, 0, self.num_preemptions
        prompts, decodes = self._prompts_and_decodes()
        candidates = self._candidates(has_prompts=bool(prompts))
        if candidates or prompts:
            reserved, self._unreserved = divmod(budget + self._unreserved, PROMPT_SHARE)
        left = reserved + self._schedule_decodes(decodes, budget - reserved, chunks)
        if self.num_preemptions > num_preemptions:
            prompts = [s for s in prompts if s.state is SequenceState.RUNNING]
            candidates = []  # there is no room for others before the preempted sequence is back
        if candidates or prompts:
            self._schedule_prompts(prompts, candidates, left, chunks)
        if not chunks and decodes:  # the whole budget was reserved, and no prompt had room
            self._schedule_decodes(decodes, budget, chunks)
        if not chunks and not is_ahead and self.num_preemptions == num_preemptions and self._is_stuck:
            self._preempt(self.running[-1])
        if not chunks and self.num_preemptions > num_preemptions:
            return self.schedule(is_ahead=is_ahead)  # there is room now
        if len(decodes) > budget - reserved:
            left_out = [s for s in decodes if s.state is SequenceState.RUNNING and s.last_step < self._num_steps]
            self.num_postponed_decodes += len(left_out)
        if self.separates_roles:
            chunks.sort(key=_is_prompt)
        return chunks

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Start a child that has the same tokens as its parent.

        The child shares the parent's blocks and runs at once. It is queued instead if the parent is not running, or if
        ``max_num_seqs`` sequences run already, as may happen after a beam was preempted.
        """
        if parent.state is SequenceState.RUNNING and self._num_slots < self.max_num_seqs:
            self.block_manager.fork(parent, child)
            child.state = SequenceState.RUNNING
            bisect.insort(self.running, child, key=_order)
        else:
            self.num_queued_forks += 1
            self.add(child)

    def resume(self, sequence: Sequence) -> None:
        """Queue a sequence that was preempted while it waited for its next token; do nothing for a running one."""
        if sequence.state is SequenceState.PENDING:
            self.add(sequence)

    def finish(self, sequence: Sequence, keep_blocks: bool = False) -> None:
        """End a sequence in any state.

        Args:
            sequence: sequence to end.
            keep_blocks: whether the sequence keeps its blocks, as pinned prompts do, instead of freeing them.
        """
        if sequence.state is SequenceState.RUNNING:
            self.running.remove(sequence)
        elif sequence.state is SequenceState.WAITING:
            self._dequeue(sequence)
        if not keep_blocks:
            self.block_manager.free(sequence)
        sequence.state = SequenceState.FINISHED

    def restart(self, sequences: list[Sequence]) -> None:
        """Queue sequences anew after an error at an arbitrary point; those that wait for others stay pending.

        Args:
            sequences: all unfinished sequences; the block manager has taken their blocks back.
        """
        self.running = []
        self.waiting = []
        self.num_waiting_tokens = 0
        for sequence in sequences:
            sequence.restart()
            if sequence.state is not SequenceState.PENDING:
                self.add(sequence)

    def _dequeue(self, sequence: Sequence) -> None:
        self.waiting.remove(sequence)
        self.num_waiting_tokens -= sequence.num_queued_tokens

    def _prompts_and_decodes(self) -> tuple[list[Sequence], list[Sequence]]:
        """Return the running sequences whose prompts are computed, and those that decode, in the order of service.

        A beam that waits for the other beams of its request has no token to compute.
        """
        prompts, decodes = [], []
        for sequence in self.running:
            if not sequence.is_decoding:
                prompts.append(sequence)
            elif sequence.num_uncomputed_tokens:
                decodes.append(sequence)
        if self._num_in_flight > 1:
            most = -(-len(decodes) // self._num_in_flight)
            decodes = [sequence for sequence in decodes if not sequence.num_unknown_tokens][:most]
        return prompts, decodes

    def _candidates(self, has_prompts: bool) -> list[Sequence]:
        """Return the waiting sequences that may be admitted in this step, in the order of service."""
        if not self.waiting:
            return []
        if self._num_slots < self.max_num_seqs:
            return self.waiting[:LOOKAHEAD]
        # Only the first one may have a slot, that of a less urgent prompt.
        return self.waiting[:1] if has_prompts else []

    def _schedule_decodes(self, decodes: list[Sequence], budget: int, chunks: list[Chunk]) -> int:
        """Add the chunks of decoding sequences, given in the order of service, and return the rest of the budget."""
        if len(decodes) > budget:
            chosen = set(heapq.nsmallest(budget, decodes, key=lambda s: (s.priority, s.last_step)))
            decodes = [sequence for sequence in decodes if sequence in chosen]
        num_later, can_append = len(decodes), self.block_manager.append
        for sequence in decodes:
            if sequence.state is not SequenceState.RUNNING:
                break  # preempted for an earlier one, as all later ones were
            num_later -= 1  # one token is left to each later sequence
            num_drafts = 0
            if sequence.num_drafts:
                num_drafts = max(min(sequence.num_drafts, budget - sequence.num_uncomputed_tokens - num_later), 0)
                if num_drafts and not can_append(sequence, num_drafts):
                    num_drafts = 0  # drafts are not worth a preemption
                self.num_cut_drafts += sequence.num_drafts - num_drafts
            while sequence.state is SequenceState.RUNNING and not can_append(sequence, num_drafts):
                self._preempt(self.running[-1])
            if sequence.state is not SequenceState.RUNNING:
                break
            num_tokens = min(sequence.num_uncomputed_tokens, budget - num_later)
            self._add_chunk(sequence, num_tokens, chunks, num_drafts)
            budget -= num_tokens + num_drafts
        return budget

    def _schedule_prompts(
        self, prompts: list[Sequence], candidates: list[Sequence], budget: int, chunks: list[Chunk]
    ) -> None:
        """Add chunks of prompts, of running sequences and of waiting ones that are admitted now."""
        for sequence in prompts:
            self.block_manager.load(sequence)
            self.block_manager.reuse_modules(sequence)
        prompts = sorted([*prompts, *candidates], key=_order)
        shares = dict.fromkeys(prompts, 0)
        admissions = _Admissions(self._num_slots, self.max_num_seqs)
        half, self._undivided = divmod(budget + self._undivided, 2)
        if prompts and (images := prompts[0].images) is not None:  # an image that one step must compute
            half = max(half, min(budget, images.num_together(prompts[0].num_computed_tokens)))
        budget += self._share_out(half, prompts, shares, admissions) - half
        for sequence in candidates:  # those whom nobody may overtake take their room before it is given to shorter ones
            is_open = sequence.state is SequenceState.RUNNING or admissions.may_be_overtaken(sequence)
            if not is_open and sequence not in admissions.without_room:
                self._try_to_admit(sequence, admissions)
        refused = set(admissions.without_room)
        shortest = [sequence for sequence in prompts if sequence not in refused]
        shortest.sort(key=lambda s: (s.priority, s.num_uncomputed_tokens - shares[s]))
        self._share_out(budget, shortest, shares, admissions)
        for sequence, num_tokens in shares.items():
            if num_tokens:
                self._add_chunk(sequence, num_tokens, chunks)

    def _share_out(
        self, budget: int, prompts: Iterable[Sequence], shares: dict[Sequence, int], admissions: "_Admissions"
    ) -> int:
        """Add to each prompt's share what it still needs and has room, from the first on.

        Returns:
            The rest of the budget.
        """
        for sequence in prompts:
            if not budget:
                break
            is_admitted = sequence.state is SequenceState.RUNNING or self._try_to_admit(sequence, admissions)
            if is_admitted and not sequence.is_loading:
                computed = sequence.num_computed_tokens + shares[sequence]
                wanted = computed + min(self._num_computable(sequence) - shares[sequence], budget)
                end = self.block_manager.extend(sequence, wanted, len(self.running) - 1)
                num_tokens = max(0, sequence.chunk_end(end, self._chunk_multiple) - computed)
                shares[sequence] += num_tokens
                budget -= num_tokens
        return budget

    def _num_computable(self, sequence: Sequence) -> int:
        """Return how many of a running prompt's tokens a step may compute: not beyond the border between two roles."""
        num_left = sequence.num_prompt_tokens - sequence.num_computed_tokens
        if self.separates_roles and num_left > 0:
            return num_left
        return sequence.num_uncomputed_tokens

    def _try_to_admit(self, sequence: Sequence, admissions: "_Admissions") -> bool:
        """Admit a waiting sequence if it has room and may overtake those that have none."""
        if sequence.order > admissions.last_order:
            return False
        while not self._has_room(sequence, admissions):
            prompt = self._last_prompt_after(sequence.priority)
            if prompt is None:
                admissions.refuse(sequence)
                return False
            admissions.num_slots -= prompt.num_slots
            self._preempt(prompt)
        self.num_overtakings += admissions.admit(sequence)
        self._dequeue(sequence)
        self.block_manager.allocate(sequence)
        sequence.state = SequenceState.RUNNING
        bisect.insort(self.running, sequence, key=_order)
        return True

    def _has_room(self, sequence: Sequence, admissions: "_Admissions") -> bool:
        """Return whether there are slots and blocks for a waiting sequence."""
        if admissions.num_slots + sequence.num_slots > self.max_num_seqs:
            return False
        # One block per running sequence must stay available, so that the admission causes no preemption in the next
        # step. This also keeps a sequence from returning right after its own preemption.
        spare, manager = len(self.running), self.block_manager
        if admissions.without_room:  # searching the cache for the prefix of every later sequence would take too long
            return manager.has_room(len(sequence), spare)
        return manager.can_allocate(sequence, spare)

    def _last_prompt_after(self, priority: int) -> Sequence | None:
        """Return the last of the running sequences that is less urgent and still computes its prompt, if any."""
        less_urgent = itertools.takewhile(lambda sequence: sequence.priority > priority, reversed(self.running))
        return next((sequence for sequence in less_urgent if not sequence.is_decoding), None)

    def _preempt(self, sequence: Sequence) -> None:
        """Preempt a running sequence; all its tokens, generated ones included, will be computed again."""
        self.running.remove(sequence)
        waits_for_others = _waits_for_others(sequence)
        sequence.forget_launched()
        self.block_manager.free(sequence)
        if waits_for_others:
            sequence.state = SequenceState.PENDING
        else:
            self.add(sequence)
        self.num_preemptions += 1

    @property
    def _is_stuck(self) -> bool:
        """Whether only a preemption helps, if a step has nothing to compute.

        Running prompts find no room for a chunk, or all running sequences wait for a beam that has no room beside them.
        """
        if any(sequence.is_loading for sequence in self.running):
            return False
        if any(not sequence.is_decoding for sequence in self.running):
            return True
        return bool(self.waiting and self.running) and all(map(_waits_for_others, self.running))

    @property
    def _num_slots(self) -> int:
        """Number of running sequences, siblings that will be forked from them included."""
        return sum(sequence.num_slots for sequence in self.running)

    def _add_chunk(self, sequence: Sequence, num_tokens: int, chunks: list[Chunk], num_drafts: int = 0) -> None:
        if sequence.last_step < 0:
            sequence.first_scheduled_time = self._clock()
        sequence.last_step = self._num_steps
        chunks.append(Chunk(sequence, num_tokens, num_drafts))


@dataclass(slots=True)
class _Admissions:
    """The admissions of one step.

    Attributes:
        num_slots: slots of the running sequences.
        max_overtakers: maximum number of sequences that may overtake one without room.
        last_order: place in the order of service after which nobody may be admitted.
        without_room: sequences whose turn it was but for which there is no room.
    """

    num_slots: int
    max_overtakers: int
    last_order: tuple[float, float] = (math.inf, math.inf)
    without_room: list[Sequence] = field(default_factory=list)

    def admit(self, sequence: Sequence) -> bool:
        """Count an admission, and return whether the sequence overtakes any other."""
        self.num_slots += sequence.num_slots
        overtaken = [other for other in self.without_room if other.order < sequence.order]
        for other in overtaken:
            other.num_overtakers += 1
            self._close_after(other)
        return bool(overtaken)

    def refuse(self, sequence: Sequence) -> None:
        """Record that a sequence has no room."""
        self.without_room.append(sequence)
        self._close_after(sequence)

    def may_be_overtaken(self, sequence: Sequence) -> bool:
        """Return whether later sequences of the same priority may be admitted while there is no room for this one."""
        return sequence.num_overtakers < self.max_overtakers and not sequence.num_output_tokens

    def _close_after(self, sequence: Sequence) -> None:
        """Exclude those that must not overtake a sequence without room."""
        limit = (sequence.priority, math.inf) if self.may_be_overtaken(sequence) else sequence.order
        self.last_order = min(self.last_order, limit)


def _waits_for_others(sequence: Sequence) -> bool:
    """Return whether a running sequence has no token to compute until others of its request have theirs."""
    return not sequence.num_uncomputed_tokens and not sequence.num_unknown_tokens


def _is_prompt(chunk: Chunk) -> bool:
    return chunk.is_prompt


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.order
