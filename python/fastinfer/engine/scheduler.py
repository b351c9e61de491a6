"""Which tokens the next step computes."""

from collections import deque
from dataclasses import dataclass

from fastinfer.engine.kv_cache import KVCache
from fastinfer.engine.sequence import Sequence, SequenceState


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next ``num_tokens`` uncomputed tokens of a sequence: one while it decodes, more of a prompt."""

    sequence: Sequence
    num_tokens: int

    @property
    def is_last(self) -> bool:
        """Whether it reaches the end of the sequence, so that the next token can be sampled."""
        return self.num_tokens == self.sequence.num_uncomputed_tokens


class Scheduler:
    """First come, first served, within a budget of tokens and of sequences per step.

    Running sequences are served in the order of admission. A prompt longer than what is left of the budget is cut into
    chunks, and nothing behind it is admitted before its last one. So all running sequences but the newest decode, and
    the loop over them is at the same time "decodes first, then prefill".

    The oldest sequence always progresses: it is preempted last, and the engine sees to it that the cache holds at
    least one sequence of the greatest length.
    """

    def __init__(self, kv_cache: KVCache, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.kv_cache = kv_cache
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def schedule(self) -> list[Chunk]:
        """Choose the step's chunks and give each the cache blocks it needs; empty when nothing is left to do."""
        chunks: list[Chunk] = []
        budget = self.max_num_batched_tokens

        index = 0
        while index < len(self.running) and budget:
            sequence = self.running[index]
            while not self.kv_cache.can_append(sequence):
                self._preempt_newest()
                if sequence.state is SequenceState.WAITING:
                    break
            else:
                self.kv_cache.append(sequence)
                budget -= self._take(sequence, budget, chunks)
                index += 1

        while budget and self._can_admit():
            sequence = self._admit()
            budget -= self._take(sequence, budget, chunks)
        return chunks

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, whatever its state, and free its blocks; the second time does nothing."""
        if sequence.state is SequenceState.RUNNING:
            self.running.remove(sequence)
        elif sequence.state is SequenceState.WAITING:
            self.waiting.remove(sequence)
        self.kv_cache.free(sequence)
        sequence.state = SequenceState.FINISHED

    @staticmethod
    def _take(sequence: Sequence, budget: int, chunks: list[Chunk]) -> int:
        num_tokens = min(sequence.num_uncomputed_tokens, budget)
        chunks.append(Chunk(sequence, num_tokens))
        return num_tokens

    def _can_admit(self) -> bool:
        if not self.waiting or len(self.running) == self.max_num_seqs:
            return False
        # One spare block for each running sequence, or the admission could cause a preemption in the next step. It also
        # keeps out a sequence that was preempted a moment ago.
        return self.kv_cache.can_allocate(self.waiting[0], spare=len(self.running))

    def _admit(self) -> Sequence:
        sequence = self.waiting.popleft()
        self.kv_cache.allocate(sequence)
        sequence.state = SequenceState.RUNNING
        self.running.append(sequence)
        return sequence

    def _preempt_newest(self) -> None:
        """Free the newest running sequence's blocks; it will be computed again, generated tokens included."""
        sequence = self.running.pop()
        self.kv_cache.free(sequence)
        sequence.num_computed_tokens = 0
        sequence.state = SequenceState.WAITING
        self.waiting.appendleft(sequence)
        self.num_preemptions += 1
