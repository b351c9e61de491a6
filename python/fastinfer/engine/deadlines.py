"""Deadlines of requests."""

import heapq
import itertools
import time
import weakref
from collections.abc import Iterator

from fastinfer.engine.request import Request


class Deadlines:
    """The moments by which requests must have ended, or must have been begun."""

    def __init__(self) -> None:
        # (time, number, request, name of the limit); the numbers keep requests from being compared.
        self._heap: list[tuple[float, int, weakref.ref[Request], str]] = []
        self._numbers = itertools.count()
        self._prune_at = 64

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._heap)

    def add(self, request: Request, timeout: float | None, queue_timeout: float | None) -> None:
        """Begin to count a request's time.

        Args:
            request: the request.
            timeout: seconds in which the request must end; ``None`` for no limit.
            queue_timeout: seconds in which its first tokens must be computed; ``None`` for no limit.
        """
        if len(self._heap) >= self._prune_at:  # most of them have ended
            self._heap = [entry for entry in self._heap if entry[2]() is not None]
            heapq.heapify(self._heap)
            self._prune_at = 2 * len(self._heap) + 64
        now = time.perf_counter()
        for name, seconds in (("timeout", timeout), ("queue_timeout", queue_timeout)):
            if seconds is not None:
                heapq.heappush(self._heap, (now + seconds, next(self._numbers), weakref.ref(request), name))

    def expired(self) -> Iterator[tuple[Request, str]]:
        """Yield each request that has missed a deadline, with the name of the limit, and forget the deadline then."""
        while self._heap and self._heap[0][0] <= time.perf_counter():
            request, name = self._heap[0][2](), self._heap[0][3]
            if request is not None and request.unfinished and not (name == "queue_timeout" and _has_begun(request)):
                yield request, name
            heapq.heappop(self._heap)


def _has_begun(request: Request) -> bool:
    return any(sequence.first_scheduled_time is not None for sequence in request.sequences)
