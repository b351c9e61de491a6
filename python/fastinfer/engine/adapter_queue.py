"""The requests that wait for their LoRA adapters."""

import bisect
import heapq
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from dataclasses import dataclass, field

from fastinfer.engine.adapters import Adapters
from fastinfer.engine.request import Request
from fastinfer.engine.waiting_requests import WaitingRequests


@dataclass(slots=True)
class _Group:
    """The requests that wait for one adapter.

    Attributes:
        requests: the requests in the order of service; some may have been removed from the queue already.
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
    """

    def __init__(self, adapters: Adapters, max_overtakers: int) -> None:
        self._adapters = adapters
        self._max_overtakers = max_overtakers
        # These are the requests that wait, even if an interrupt has left others in the groups.
        self._waiting = WaitingRequests()
        self._groups: dict[str, _Group] = {}  # by the adapter's key

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the waiting requests' prompts."""
        return self._waiting.num_tokens

    def add(self, request: Request) -> None:
        """Queue a request, whose sequences have an adapter."""
        group = self._groups.setdefault(request.sequences[0].adapter_key, _Group())
        bisect.insort(group.requests, request, key=_order)
        self._waiting.add(request)

    def discard(self, request_id: str) -> None:
        """Remove a request, if it is there."""
        request = self._waiting.pop(request_id)
        if request is not None:
            self._groups[request.sequences[0].adapter_key].requests.remove(request)

    def admit(self, slots_in_use: Callable[[], set[int]]) -> Iterator[tuple[Request, int | Exception]]:
        """Yield the requests whose adapters are in a slot now, with the slot, and those that failed, with the error.

        The caller must remove each of them before it takes the next one.

        Args:
            slots_in_use: function that returns the slots of all unfinished requests that left this queue.
        """
        firsts = [(self._first(key), key) for key in list(self._groups)]
        queue = sorted((_order(first), key) for first, key in firsts if first is not None)  # a heap
        errors = self._adapters.fetch([key for _, key in queue])
        without_slot: list[_Group] = []
        while queue:
            _, key = heapq.heappop(queue)
            group = self._groups[key]
            request = group.requests[0]
            result: int | Exception | None = errors.get(key)
            if result is None:
                # Where an earlier request has found no slot free there is none.
                result = self._slot(key, None if without_slot else slots_in_use)
            if result is not None:
                if not isinstance(result, Exception):
                    for other in without_slot:
                        other.num_overtakers += 1
                yield request, result
                if (following := self._first(key)) is not None:
                    heapq.heappush(queue, (_order(following), key))
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

    def _first(self, key: str) -> Request | None:
        """Return the first request that waits for an adapter, and forget the adapter if there is none."""
        requests = self._groups[key].requests
        while requests and requests[0] not in self._waiting:
            del requests[0]
        if requests:
            return requests[0]
        del self._groups[key]
        return None

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
