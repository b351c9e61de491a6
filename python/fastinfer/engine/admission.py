"""Admission of waiting sequences: continuous batching, and two older policies to compare it with."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence as List

from fastinfer.engine.sequence import Sequence


class AdmissionPolicy(ABC):
    """Decides which waiting sequences may start; the scheduler then checks the memory and the token budget."""

    @abstractmethod
    def num_admissible(self, waiting: List[Sequence], running: List[Sequence], now: float) -> int:
        """Return how many waiting sequences, from the first on, may be admitted now.

        Args:
            waiting: waiting sequences in the order of the queue; at least one.
            running: running sequences.
            now: current time in seconds of ``time.perf_counter``.
        """


class Continuous(AdmissionPolicy):
    """Admits waiting sequences in every step (Orca, Yu et al., 2022)."""

    def num_admissible(self, waiting: List[Sequence], running: List[Sequence], now: float) -> int:
        return len(waiting)


class Static(AdmissionPolicy):
    """Forms a batch from the waiting sequences, and the next batch when all sequences of this one have finished.

    A preempted member may return to its batch; no other sequence takes its place.

    Args:
        max_seqs: maximum number of sequences in a batch.
    """

    def __init__(self, max_seqs: int) -> None:
        self._max_seqs = max_seqs
        self._batch: set[str] = set()  # request ids, so that forks of a member belong to the batch

    def num_admissible(self, waiting: List[Sequence], running: List[Sequence], now: float) -> int:
        if not running and waiting[0].request_id not in self._batch:
            self._batch = {sequence.request_id for sequence in waiting[: self._batch_size(waiting, now)]}
        return len(list(itertools.takewhile(lambda sequence: sequence.request_id in self._batch, waiting)))

    def _batch_size(self, waiting: List[Sequence], now: float) -> int:
        """Return the number of waiting sequences for the next batch; 0 to wait for more."""
        return min(len(waiting), self._max_seqs)


class Dynamic(Static):
    """Forms static batches, but waits until a batch is full or its first member has waited long enough.

    Args:
        max_seqs: maximum number of sequences in a batch.
        max_tokens: maximum number of prompt tokens in a batch; a longer prompt forms a batch of its own.
        max_wait_s: maximum time in seconds that a request waits for the batch to fill.
    """

    def __init__(self, max_seqs: int, max_tokens: int, max_wait_s: float) -> None:
        super().__init__(max_seqs)
        self._max_tokens = max_tokens
        self._max_wait_s = max_wait_s

    def _batch_size(self, waiting: List[Sequence], now: float) -> int:
        size, tokens = 1, len(waiting[0])
        while size < min(len(waiting), self._max_seqs) and tokens + len(waiting[size]) <= self._max_tokens:
            tokens += len(waiting[size])
            size += 1
        is_full = size < len(waiting) or size == self._max_seqs
        return size if is_full or now - min(s.arrival_time for s in waiting) >= self._max_wait_s else 0
