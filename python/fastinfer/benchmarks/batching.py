"""Two older ways to batch requests, to compare with the engine's own.

The engine admits waiting requests in every step (continuous batching: Orca, Yu et al., 2022). These policies hold
requests back before they reach it.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

MAX_WAIT_S = 0.05


class Batching(ABC):
    """Decides when requests that have arrived are passed on to the engine."""

    @abstractmethod
    def num_ready(self, prompt_lengths: Sequence[int], waited_s: float, is_idle: bool) -> int:
        """Return how many requests, from the first on, the engine gets now.

        Args:
            prompt_lengths: lengths in tokens of the requests that wait, in the order of arrival; at least one.
            waited_s: time in seconds that the first one has waited.
            is_idle: whether the engine has no requests.
        """


class Continuous(Batching):
    """Leaves all batching to the engine."""

    def num_ready(self, prompt_lengths: Sequence[int], waited_s: float, is_idle: bool) -> int:
        return len(prompt_lengths)


class Static(Batching):
    """Forms a batch of the requests that wait, and the next one when all requests of this one have ended.

    Args:
        max_seqs: maximum number of requests in a batch.
    """

    def __init__(self, max_seqs: int) -> None:
        self._max_seqs = max_seqs

    def num_ready(self, prompt_lengths: Sequence[int], waited_s: float, is_idle: bool) -> int:
        return min(len(prompt_lengths), self._max_seqs) if is_idle else 0


class Dynamic(Batching):
    """Forms static batches, but waits until a batch is full or its first request has waited long enough.

    Args:
        max_seqs: maximum number of requests in a batch.
        max_tokens: maximum number of prompt tokens in a batch; a longer prompt forms a batch of its own.
        max_wait_s: maximum time in seconds that a request waits for the batch to fill.
    """

    def __init__(self, max_seqs: int, max_tokens: int, max_wait_s: float = MAX_WAIT_S) -> None:
        self._max_seqs = max_seqs
        self._max_tokens = max_tokens
        self._max_wait_s = max_wait_s

    def num_ready(self, prompt_lengths: Sequence[int], waited_s: float, is_idle: bool) -> int:
        if not is_idle:
            return 0
        size, tokens = 1, prompt_lengths[0]
        while size < min(len(prompt_lengths), self._max_seqs) and tokens + prompt_lengths[size] <= self._max_tokens:
            tokens += prompt_lengths[size]
            size += 1
        is_full = size < len(prompt_lengths) or size == self._max_seqs
        return size if is_full or waited_s >= self._max_wait_s else 0


def policies(max_seqs: int, max_tokens: int) -> dict[str, Batching]:
    """Return all policies by name, for an engine with these limits."""
    return {"continuous": Continuous(), "static": Static(max_seqs), "dynamic": Dynamic(max_seqs, max_tokens)}
