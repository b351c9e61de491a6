"""The scheduler, which chooses the tokens that the next step computes."""

import bisect
import time
from dataclasses import dataclass, field

from fastinfer.engine.admission import AdmissionPolicy, Continuous
from fastinfer.engine.block_manager import BlockManager
from fastinfer.engine.sequence import Sequence, SequenceState


@dataclass(slots=True)
class Chunk:
    """The tokens of one sequence that a step computes.

    Attributes:
        sequence: the sequence that the tokens belong to.
        num_tokens: number of uncomputed tokens to compute: usually one during decoding, more during prefill.
        num_drafts: maximum number of drafts after the sequence's last token; their slots are allocated.
        drafts: draft tokens, which the step verifies.
        draft_gap: the sequence's ``draft_gap`` after the step if no draft is accepted.
    """

    sequence: Sequence
    num_tokens: int
    num_drafts: int = 0
    drafts: list[int] = field(default_factory=list)
    draft_gap: int = 0

    @property
    def is_last(self) -> bool:
        """Whether the chunk reaches the end of the sequence, so that the next token can be sampled."""
        return self.num_tokens == self.sequence.num_uncomputed_tokens


class Scheduler:
    """Chooses what each step computes, within limits on tokens and sequences.

    Decoding sequences come first, then chunks of prompts, then admissions from the queue. Among themselves, sequences
    are served by priority, the smallest number first, and then by arrival. A prompt that exceeds the rest of the budget
    is computed in chunks, in the same steps as the decoding sequences; no other sequence is admitted before its last
    chunk. When the cache is full, the last sequence in this order is preempted: it loses its blocks, returns to its
    place in the queue, and is computed again later.

    The first sequence always makes progress: it is preempted last, and the engine ensures that the cache holds at least
    one sequence of the maximum length.

    Args:
        block_manager: allocator of the sequences' blocks.
        max_num_seqs: maximum number of running sequences.
        max_num_batched_tokens: maximum number of tokens in a step, drafts included.
        admission_policy: policy that decides which waiting sequences may start; ``Continuous()`` by default.

    Attributes:
        waiting: queue of waiting sequences in the order of service.
        running: running sequences in the order of service.
        num_preemptions: number of preemptions since the start.
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
        """Return the chunks of the next step, with their blocks allocated; empty if nothing can be computed now."""
        chunks: list[Chunk] = []
        budget = self._schedule_decodes(chunks, self.max_num_batched_tokens)
        for sequence in self.running:
            if budget and not sequence.is_decoding:
                budget -= self._add_chunk(sequence, budget, chunks)
        if budget and self.waiting:
            self._schedule_admissions(chunks, budget)
        if not chunks and self.waiting and self.running and not any(s.num_uncomputed_tokens for s in self.running):
            self._preempt_last()  # all running sequences wait for a beam that has no room beside them
            return self.schedule()
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
            self.add(child)

    def resume(self, sequence: Sequence) -> None:
        """Queue a sequence that was preempted while it waited for its next token; do nothing for a running one."""
        if sequence.state is SequenceState.PENDING:
            self.add(sequence)

    def finish(self, sequence: Sequence, keep_blocks: bool = False) -> None:
        """End a sequence in any state.

        Args:
            sequence: sequence to end.
            keep_blocks: whether the sequence keeps its blocks, as prompt modules do, instead of freeing them.
        """
        if sequence.state is SequenceState.RUNNING:
            self.running.remove(sequence)
        elif sequence.state is SequenceState.WAITING:
            self.waiting.remove(sequence)
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
        for sequence in sequences:
            sequence.restart()
            if sequence.state is not SequenceState.PENDING:
                self.add(sequence)

    def _schedule_decodes(self, chunks: list[Chunk], budget: int) -> int:
        """Add the chunks of the decoding sequences, and return the rest of the token budget."""
        index = 0
        while index < len(self.running) and budget:
            sequence = self.running[index]
            # A beam that waits for the other beams of its request has no token to compute.
            if not sequence.is_decoding or not sequence.num_uncomputed_tokens:
                index += 1
                continue
            # Drafts get only the budget that is left by this sequence's own tokens (several if a grammar forced some)
            # and by one token of each sequence after it.
            reserved = sequence.num_uncomputed_tokens + len(self.running) - index - 1
            num_drafts = max(min(sequence.num_drafts, budget - reserved), 0)
            if num_drafts and not self.block_manager.can_append(sequence, num_drafts):
                num_drafts = 0  # drafts are not worth a preemption
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
        """Admit waiting sequences, and add their first chunks."""
        admissible = self.admission_policy.num_admissible(self.waiting, self.running, time.perf_counter())
        num_slots = self._num_slots
        while budget and admissible and self.waiting:
            sequence = self.waiting[0]
            num_slots += sequence.num_slots
            # One block per running sequence must stay available, so that the admission causes no preemption in the next
            # step. This also keeps a sequence from returning right after its own preemption.
            if num_slots > self.max_num_seqs or not self.block_manager.can_allocate(sequence, spare=len(self.running)):
                return
            self._admit()
            admissible -= 1
            budget -= self._add_chunk(sequence, budget, chunks)

    def _admit(self) -> None:
        """Move the first waiting sequence to the running ones, and allocate its blocks."""
        sequence = self.waiting.pop(0)
        self.block_manager.allocate(sequence)
        sequence.state = SequenceState.RUNNING
        bisect.insort(self.running, sequence, key=_order)

    def _preempt_last(self) -> None:
        """Preempt the last running sequence; all its tokens, generated ones included, will be computed again."""
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
        """Number of running sequences, siblings that will be forked from them included."""
        return sum(sequence.num_slots for sequence in self.running)

    @staticmethod
    def _add_chunk(sequence: Sequence, budget: int, chunks: list[Chunk], num_drafts: int = 0) -> int:
        """Add a chunk of the sequence, and return the number of its tokens, drafts included."""
        num_tokens = min(sequence.num_uncomputed_tokens, budget - num_drafts)
        chunks.append(Chunk(sequence, num_tokens, num_drafts))
        return num_tokens + num_drafts


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.order
