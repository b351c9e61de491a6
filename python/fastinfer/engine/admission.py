"""When waiting sequences may join the running ones: continuous batching, and two older policies to compare it with."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence as List

from fastinfer.engine.sequence import Sequence


class AdmissionPolicy(ABC):
    """Decides about admissions; memory and the budget decide after it."""

    @abstractmethod
    def num_admissible(self, waiting: List[Sequence], running: List[Sequence], now: float) -> int:
        """How many of the waiting sequences, which are some, may be admitted now, from the first on."""


class Continuous(AdmissionPolicy):
    """Whoever fits joins in any step (Orca, Yu et al., 2022)."""

    def num_admissible(self, waiting: List[Sequence], running: List[Sequence], now: float) -> int:
        return len(waiting)


class Static(AdmissionPolicy):
    """What waits forms a batch, and the next batch is formed when all of it has finished. A member that is preempted
    may come back; nobody else takes its place.

    Args:
        max_seqs: of a batch.
    """

    def __init__(self, max_seqs: int) -> None:
        self._max_seqs = max_seqs
        self._batch: set[str] = set()  # request ids: what a member forks belongs to it

    def num_admissible(self, waiting: List[Sequence], running: List[Sequence], now: float) -> int:
        if not running and waiting[0].request_id not in self._batch:
            self._batch = {sequence.request_id for sequence in waiting[: self._batch_size(waiting, now)]}
        return len(list(itertools.takewhile(lambda sequence: sequence.request_id in self._batch, waiting)))

    def _batch_size(self, waiting: List[Sequence], now: float) -> int:
        return min(len(waiting), self._max_seqs)


class Dynamic(Static):
    """A static batch that waits for company: until it is full, or its first member has waited long enough.

    Args:
        max_seqs: of a batch.
        max_tokens: of a batch's prompts together; one longer prompt is a batch of its own.
        max_wait_s: how long a request waits for others.
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
