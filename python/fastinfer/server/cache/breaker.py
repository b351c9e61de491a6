"""Circuit breaker: a service that fails again and again is left alone for a while."""

import time
from collections.abc import Callable


class CircuitBreaker:
    """Decides whether a call is worth trying.

    After ``max_failures`` failures in a row no call is allowed for ``pause_s`` seconds. Then one call is tried: if it
    succeeds, all are allowed again, otherwise the next pause begins.

    Args:
        max_failures: failures in a row that end the trust.
        pause_s: seconds of a pause.
        clock: source of the time in seconds.
    """

    def __init__(self, max_failures: int, pause_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_failures = max_failures
        self._pause_s = pause_s
        self._clock = clock
        self._num_failures = 0
        self._next_try = 0.0

    @property
    def is_open(self) -> bool:
        """Whether the service counts as down."""
        return self._num_failures >= self._max_failures

    def allows_call(self) -> bool:
        """Say whether to make a call now; whoever gets ``True`` reports how it went."""
        if not self.is_open:
            return True
        now = self._clock()
        if now < self._next_try:
            return False
        self._next_try = now + self._pause_s  # others wait for the outcome of this one
        return True

    def succeeded(self) -> None:
        """Report a successful call."""
        self._num_failures = 0

    def failed(self) -> None:
        """Report a failed call."""
        self._num_failures += 1
        self._next_try = self._clock() + self._pause_s
