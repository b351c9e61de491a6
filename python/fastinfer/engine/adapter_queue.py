"""The requests that wait for their LoRA adapters."""

import bisect
import heapq
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from dataclasses import dataclass, field

from fastinfer.engine.adapters import Adapters
from fastinfer.engine.request import Request


@dataclass(slots=True)
class _Group:
    """The requests that wait for one adapter.

    Attributes:
        requests: the requests in the order of service.
        num_overtakers: number of requests that had or got a slot while there was none for the first of these.
    """

    requests: list[Request] = field(default_factory=list)
    num_overtakers: int = 0


class AdapterQueue:
    """Requests whose adapters are in no slot yet, or that wait behind others for a slot.

    Requests are served by priority, then by arrival. One whose adapter is still being read holds up nobody. One whose
    adapter finds no free slot may be overtaken by requests whose adapters have a slot, but by no more than
    ``max_overtakers``: the running requests then end one by one until a slot is free.

    A step takes time in proportion to the number of adapters that are waited for and of requests that it admits, not to
    the number of requests that wait.

    Args:
        adapters: the adapters.
        max_overtakers: see above.

    Attributes:
        num_tokens: number of tokens of the waiting requests' prompts.
    """

    def __init__(self, adapters: Adapters, max_overtakers: int) -> None:
        self.num_tokens = 0
        self._adapters = adapters
        self._max_overtakers = max_overtakers
        self._waiting: dict[str, Request] = {}  # by the request's id
        self._groups: dict[str, _Group] = {}  # by the adapter's key

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: Request) -> None:
        """Queue a request, whose sequences have an adapter."""
        first = request.sequences[0]
        self._waiting[request.request_id] = request
        bisect.insort(self._groups.setdefault(first.adapter_key, _Group()).requests, request, key=_order)
        self.num_tokens += len(first)

    def discard(self, request_id: str) -> None:
        """Remove a request, if it is there."""
        request = self._waiting.pop(request_id, None)
        if request is not None:
            first = request.sequences[0]
            group = self._groups[first.adapter_key]
            group.requests.remove(request)
            if not group.requests:
                del self._groups[first.adapter_key]
            self.num_tokens -= len(first)

    def admit(self, slots_in_use: Callable[[], set[int]]) -> Iterator[tuple[Request, int | Exception]]:
        """Yield the requests whose adapters are in a slot now, with the slot, and those that failed, with the error.

        The caller must remove each of them before it takes the next one.

        Args:
            slots_in_use: function that returns the slots of all unfinished requests that left this queue.
        """
        queue = sorted((_order(group.requests[0]), key) for key, group in self._groups.items())  # a heap
        errors = self._adapters.fetch([key for _, key in queue])
        without_slot: list[_Group] = []
        while queue:
            _, key = heapq.heappop(queue)
            group = self._groups[key]
            result: int | Exception | None = errors.get(key)
            if result is None:
                # Where an earlier request has found no slot free there is none.
                result = self._slot(key, None if without_slot else slots_in_use)
            if result is not None:
                if not isinstance(result, Exception):
                    for other in without_slot:
                        other.num_overtakers += 1
                yield group.requests[0], result
                if group.requests:
                    heapq.heappush(queue, (_order(group.requests[0]), key))
            elif self._adapters.is_in_memory(key):
                without_slot.append(group)
            if any(other.num_overtakers >= self._max_overtakers for other in without_slot):
                return

    def wait(self, seconds: float) -> None:
        """Wait until an adapter has been read, but no longer than this."""
        if reads := self._adapters.reads:
            wait(reads, timeout=seconds)
        else:
            time.sleep(seconds)

    def _slot(self, key: str, slots_in_use: Callable[[], set[int]] | None) -> int | Exception | None:
        """Return the slot of an adapter, into which it is copied if need be.

        Args:
            key: the adapter.
            slots_in_use: function that returns the slots that must not be replaced; ``None`` to replace none.

        Returns:
            The slot; ``None`` if there is none, or the adapter is not in memory yet; or the error of the copy.
        """
        slot = self._adapters.slot(key)
        if slot is not None or slots_in_use is None or not self._adapters.is_in_memory(key):
            return slot
        try:
            return self._adapters.place(key, slots_in_use())
        except Exception as error:
            return error


def _order(request: Request) -> tuple[int, int]:
    return request.sequences[0].order
