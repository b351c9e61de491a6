"""Single flight: of equal requests that run at the same time one is computed, and the others get its answer."""

import asyncio
import time
from collections import deque
from typing import NamedTuple

# A bound on what a leader whose client reads slowly costs the others.
MAX_WAIT_S = 5.0


class Entry(NamedTuple):
    """Result of a request's entry.

    Attributes:
        leads: whether it leads, and must leave.
        value: the answer of the leader for which it has waited; ``None`` if it did not get one.
    """

    leads: bool
    value: bytes | None


class SingleFlight:
    """Lets one request per key through at a time.

    ::

        leads, value = await flight.enter(key)
        if value is None:
            value = await compute()
        if leads:
            flight.leave(key, value)

    The first one enters at once and leads. The others wait until it leaves, and get its answer. If the leader fails or
    is cancelled, the next one leads. Whoever has waited ``max_wait_s`` enters too, and computes for itself.

    Args:
        max_wait_s: longest wait in seconds.
    """

    def __init__(self, max_wait_s: float = MAX_WAIT_S) -> None:
        self._max_wait_s = max_wait_s
        # Per key with a leader: those who wait, who are told whether they lead now.
        self._waiting: dict[str, deque[asyncio.Future[Entry]]] = {}

    async def enter(self, key: str, max_wait_s: float = MAX_WAIT_S) -> Entry:
        """Wait for the turn.

        Args:
            key: the request's key.
            max_wait_s: longest wait of this request in seconds, if that is less than any other's.
        """
        if key not in self._waiting:
            self._waiting[key] = deque()
            return Entry(True, None)
        return await self._wait(key, min(max_wait_s, self._max_wait_s))

    def leave(self, key: str, value: bytes | None) -> None:
        """End the lead.

        Args:
            key: the request's key.
            value: the answer for those who wait; without one the next of them leads.
        """
        if value is not None:
            for turn in self._waiting.pop(key):
                turn.set_result(Entry(False, value))
        elif self._waiting[key]:
            self._waiting[key].popleft().set_result(Entry(True, None))
        else:
            del self._waiting[key]

    async def _wait(self, key: str, max_wait_s: float) -> Entry:
        turn: asyncio.Future[Entry] = asyncio.get_running_loop().create_future()
        waiting = self._waiting[key]
        waiting.append(turn)
        deadline = time.monotonic() + max_wait_s
        try:
            # uvloop's timers can fire a millisecond early. With a millisecond left, a request would be computed.
            while not turn.done() and (rest := deadline - time.monotonic()) > 0:
                await asyncio.wait({turn}, timeout=rest)
        except asyncio.CancelledError:
            # The lead may have come at the same moment as the cancellation.
            if turn.done() and turn.result().leads:
                self.leave(key, None)
            elif not turn.done():
                waiting.remove(turn)
            raise
        if turn.done():
            return turn.result()
        waiting.remove(turn)
        return Entry(False, None)
