"""Matches stop strings in a text that grows piece by piece."""

from collections.abc import Iterable


class StopStringMatcher:
    """Finds the first stop string in a growing text, and releases the text before it.

    Text that may be the beginning of a stop string is held back, so that released text never has to be withdrawn. If
    several stop strings occur, the one that ends first wins. The result therefore does not depend on how the text is
    divided into pieces.

    Args:
        stop: the stop strings; none of them is empty.

    Attributes:
        matched: the stop string that was found; ``None`` until then. After a match nothing may be added.
    """

    def __init__(self, stop: Iterable[str] = ()) -> None:
        self.matched: str | None = None
        self._stop = tuple(stop)
        self._longest = max(map(len, self._stop), default=0)
        self._held = ""

    def add(self, piece: str) -> str:
        """Append a piece of text, and return the text that is released by it."""
        if not self._stop:
            return piece
        # A stop string that ends in the new piece begins in it or in the held text, which is a prefix of a stop string.
        window = self._held + piece
        found = [(start + len(stop), start, stop) for stop in self._stop if (start := window.find(stop)) >= 0]
        if found:
            _, start, self.matched = min(found)
            self._held = ""
            return window[:start]
        split = len(window) - self._num_held(window)
        self._held = window[split:]
        return window[:split]

    def flush(self) -> str:
        """Return the held text at the end of the text, where it can no longer become a stop string."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, window: str) -> int:
        """Return the length of the window's longest suffix that is a proper prefix of a stop string."""
        for length in range(min(self._longest - 1, len(window)), 0, -1):
            if any(stop.startswith(window[-length:]) for stop in self._stop):
                return length
        return 0
