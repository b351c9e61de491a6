"""The requests that wait for their LoRA adapters."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from dataclasses import dataclass

from fastinfer.engine.adapters import Adapters
from fastinfer.engine.request import Request
from fastinfer.engine.sequence import Sequence


@dataclass(slots=True)
class _Waiting:
    """A waiting request, and how many later ones got a slot or had one while this one found none free."""

    request: Request
    num_overtakers: int = 0

    @property
    def sequence(self) -> Sequence:
        """The request's first sequence, which computes its prompt."""
        return self.request.sequences[0]


class AdapterQueue:
    """Requests whose adapters are in no slot yet, or that wait behind others for a slot.

    Requests are served by priority, then by arrival. One whose adapter is still being read holds up nobody. One whose
    adapter finds no free slot may be overtaken by requests whose adapters have a slot, but by no more than
    ``max_overtakers``: the running requests then end one by one until a slot is free.

    Args:
        adapters: the adapters.
        max_overtakers: see above.
    """

    def __init__(self, adapters: Adapters, max_overtakers: int) -> None:
        self._adapters = adapters
        self._max_overtakers = max_overtakers
        self._waiting: dict[str, _Waiting] = {}  # by the request's id

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the waiting requests' prompts."""
        return sum(len(waiting.sequence) for waiting in self._waiting.values())

    def add(self, request: Request) -> None:
        """Queue a request, whose sequences have an adapter."""
        self._waiting[request.request_id] = _Waiting(request)

    def discard(self, request_id: str) -> None:
        """Remove a request, if it is there."""
        self._waiting.pop(request_id, None)

    def admit(self, slots_in_use: Callable[[], set[int]]) -> Iterator[tuple[Request, int | Exception]]:
        """Yield the requests whose adapters are in a slot now, with the slot, and those that failed, with the error.

        The caller must remove each of them.

        Args:
            slots_in_use: function that returns the slots of all unfinished requests that left this queue.
        """
        queue = sorted(self._waiting.values(), key=lambda waiting: waiting.sequence.order)
        errors = self._adapters.fetch([waiting.sequence.adapter_key for waiting in queue])
        without_slot: list[_Waiting] = []
        for waiting in queue:
            key = waiting.sequence.adapter_key
            if any(other.num_overtakers >= self._max_overtakers for other in without_slot):
                return
            if key in errors:
                yield waiting.request, errors[key]
                continue
            slot = self._adapters.slot(key)
            if slot is None and self._adapters.is_in_memory(key):
                try:
                    # Where an earlier request has found no slot free there is none.
                    slot = None if without_slot else self._adapters.place(key, slots_in_use())
                except Exception as error:
                    yield waiting.request, error
                    continue
                if slot is None:
                    without_slot.append(waiting)
            if slot is not None:
                for other in without_slot:
                    other.num_overtakers += 1
                yield waiting.request, slot

    def wait(self, seconds: float) -> None:
        """Wait until an adapter has been read, but no longer than this."""
        if reads := self._adapters.reads:
            wait(reads, timeout=seconds)
        else:
            time.sleep(seconds)
