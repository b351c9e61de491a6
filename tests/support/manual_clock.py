"""A clock that tests set."""


class ManualClock:
    """Stands in for ``time.monotonic``; ``now`` is its time in seconds."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
