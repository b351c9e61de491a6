"""Single flight: of equal requests that run at the same time one is computed, and the others wait for its answer."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

# A bound on what a leader whose client reads slowly costs the others.
MAX_WAIT_S = 5.0


class SingleFlight:
    """Lets one request per key through at a time.

    ::

        async with single_flight(key) as leads:
            if not leads and (value := await store.get(key)) is not None:
                return value
            value = await compute()
            await store.put(key, value)

    The first one enters at once and leads. The others wait until it leaves, then enter all together and look into the
    cache. If the leader fails or is cancelled, the next one leads. Whoever has waited ``max_wait_s`` enters too, and
    computes for itself.

    Args:
        max_wait_s: longest wait in seconds.
    """

    def __init__(self, max_wait_s: float = MAX_WAIT_S) -> None:
        self._max_wait_s = max_wait_s
        # Per key with a leader: those who wait, who are told whether they lead now.
        self._waiting: dict[str, deque[asyncio.Future[bool]]] = {}

    @asynccontextmanager
    async def __call__(self, key: str) -> AsyncIterator[bool]:
        """Wait for the turn; yields whether this request leads.

        Args:
            key: the request's key.
        """
        if key not in self._waiting:
            self._waiting[key] = deque()
            leads = True
        else:
            leads = await self._wait(key)
        try:
            yield leads
        except BaseException:
            if leads:
                self._hand_over(key)
            raise
        if leads:
            self._release(key)

    async def _wait(self, key: str) -> bool:
        turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        waiting = self._waiting[key]
        waiting.append(turn)
        try:
            await asyncio.wait({turn}, timeout=self._max_wait_s)
        except asyncio.CancelledError:
            # The lead may have come at the same moment as the cancellation.
            if turn.done() and turn.result():
                self._hand_over(key)
            elif not turn.done():
                waiting.remove(turn)
            raise
        if turn.done():
            return turn.result()
        waiting.remove(turn)
        return False

    def _hand_over(self, key: str) -> None:
        """Make the next one the leader."""
        if self._waiting[key]:
            self._waiting[key].popleft().set_result(True)
        else:
            del self._waiting[key]

    def _release(self, key: str) -> None:
        """Let all enter."""
        for turn in self._waiting.pop(key):
            turn.set_result(False)
