"""Which tokens the next step computes."""

import bisect
import time
from dataclasses import dataclass, field

from fastinfer.engine.admission import AdmissionPolicy, Continuous
from fastinfer.engine.block_manager import BlockManager
from fastinfer.engine.sequence import Sequence, SequenceState


@dataclass(slots=True)
class Chunk:
    """A sequence's part of a step.

    Attributes:
        sequence: whose.
        num_tokens: its next uncomputed tokens: one while it decodes, more of a prompt.
        num_drafts: room for so many drafts after its last token.
        drafts: guesses of its next tokens, which the step verifies.
        draft_gap: the sequence's after the step, should no draft be accepted.
    """

    sequence: Sequence
    num_tokens: int
    num_drafts: int = 0
    drafts: list[int] = field(default_factory=list)
    draft_gap: int = 0

    @property
    def is_last(self) -> bool:
        """Whether it reaches the end of the sequence, so that the next token can be sampled."""
        return self.num_tokens == self.sequence.num_uncomputed_tokens


class Scheduler:
    """Within a budget of tokens and of sequences per step: decodes first, then chunks of prompts, then admissions.

    Sequences are served by priority, the smallest number first, and among equals by arrival. A prompt longer than what
    is left of the budget is cut into chunks, which share their steps with the decodes; nothing new is admitted before
    its last one. When the cache is full the last sequence in this order is preempted: it gives back its blocks, waits
    again at its place in the queue, and is computed once more.

    The first sequence always progresses: it is preempted last, and the engine sees to it that the cache holds at least
    one sequence of the greatest length.

    Args:
        block_manager: where sequences get their blocks.
        max_num_seqs: that run at the same time.
        max_num_batched_tokens: of a step, drafts included.
        admission_policy: which waiting sequences may join.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        admission_policy: AdmissionPolicy | None = None,
    ) -> None:
        self.block_manager = block_manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.admission_policy = admission_policy or Continuous()
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preemptions = 0

    def add(self, sequence: Sequence) -> None:
        """Queue a pending or preempted sequence."""
        sequence.state = SequenceState.WAITING
        bisect.insort(self.waiting, sequence, key=_order)

    def schedule(self) -> list[Chunk]:
        """Choose the step's chunks and give each the cache blocks it needs; empty when nothing can be done now."""
        chunks: list[Chunk] = []
        budget = self._schedule_decodes(chunks, self.max_num_batched_tokens)
        for sequence in self.running:
            if budget and not sequence.is_decoding:
                budget -= self._add_chunk(sequence, budget, chunks)
        if budget and self.waiting:
            self._schedule_admissions(chunks, budget)
        if not chunks and self.waiting and self.running and not any(s.num_uncomputed_tokens for s in self.running):
            self._preempt_last()  # all of them wait for one that finds no room beside them
            return self.schedule()
        return chunks

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let a child with the parent's tokens run as well, from what the parent has computed; or wait, if the parent
        has been preempted, or others have taken the place of a beam that was.
        """
        if parent.state is SequenceState.RUNNING and self._num_slots < self.max_num_seqs:
            self.block_manager.fork(parent, child)
            child.state = SequenceState.RUNNING
            bisect.insort(self.running, child, key=_order)
        else:
            self.add(child)

    def resume(self, sequence: Sequence) -> None:
        """A sequence that waited for others has got its next token."""
        if sequence.state is SequenceState.PENDING:
            self.add(sequence)

    def finish(self, sequence: Sequence, keep_blocks: bool = False) -> None:
        """Take a sequence out, whatever its state, and free its blocks, or keep them in the cache; the second time does
        nothing.
        """
        if sequence.state is SequenceState.RUNNING:
            self.running.remove(sequence)
        elif sequence.state is SequenceState.WAITING:
            self.waiting.remove(sequence)
        if not keep_blocks:
            self.block_manager.free(sequence)
        sequence.state = SequenceState.FINISHED

    def _schedule_decodes(self, chunks: list[Chunk], budget: int) -> int:
        """The running sequences' newest tokens; returns what is left of the budget."""
        index = 0
        while index < len(self.running) and budget:
            sequence = self.running[index]
            # None are left to compute where a sequence waits for the others of its group.
            if not sequence.is_decoding or not sequence.num_uncomputed_tokens:
                index += 1
                continue
            # Its own tokens (several, where a grammar has forced some) and every other's come before the drafts.
            own = sequence.num_uncomputed_tokens + len(self.running) - index - 1
            num_drafts = max(min(sequence.num_drafts, budget - own), 0)
            if num_drafts and not self.block_manager.can_append(sequence, num_drafts):
                num_drafts = 0  # nobody is preempted for a guess
            while not self.block_manager.can_append(sequence, num_drafts):
                self._preempt_last()
                if sequence.state is SequenceState.WAITING:
                    break
            else:
                self.block_manager.append(sequence, num_drafts)
                budget -= self._add_chunk(sequence, budget, chunks, num_drafts)
                index += 1
        return budget

    def _schedule_admissions(self, chunks: list[Chunk], budget: int) -> None:
        admissible = self.admission_policy.num_admissible(self.waiting, self.running, time.perf_counter())
        num_slots = self._num_slots
        while budget and admissible and self.waiting:
            sequence = self.waiting[0]
            num_slots += sequence.num_slots
            # One spare block for each running sequence, or the admission could cause a preemption in the next step. It
            # also keeps out a sequence that was preempted a moment ago.
            if num_slots > self.max_num_seqs or not self.block_manager.can_allocate(sequence, spare=len(self.running)):
                return
            self._admit()
            admissible -= 1
            budget -= self._add_chunk(sequence, budget, chunks)

    def _admit(self) -> None:
        sequence = self.waiting.pop(0)
        self.block_manager.allocate(sequence)
        sequence.state = SequenceState.RUNNING
        bisect.insort(self.running, sequence, key=_order)

    def _preempt_last(self) -> None:
        """Free the last running sequence's blocks; it will be computed again, generated tokens included."""
        sequence = self.running.pop()
        waits_for_others = not sequence.num_uncomputed_tokens
        self.block_manager.free(sequence)
        if waits_for_others:
            sequence.state = SequenceState.PENDING
        else:
            self.add(sequence)
        self.num_preemptions += 1

    @property
    def _num_slots(self) -> int:
        return sum(sequence.num_slots for sequence in self.running)

    @staticmethod
    def _add_chunk(sequence: Sequence, budget: int, chunks: list[Chunk], num_drafts: int = 0) -> int:
        """Add the sequence's chunk; returns its tokens."""
        num_tokens = min(sequence.num_uncomputed_tokens, budget - num_drafts)
        chunks.append(Chunk(sequence, num_tokens, num_drafts))
        return num_tokens + num_drafts


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.order
