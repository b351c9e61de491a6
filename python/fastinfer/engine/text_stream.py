"""Generated tokens to text, up to a stop string."""

from collections.abc import Sequence
from typing import Protocol


class Detokenizer(Protocol):
    """Turns tokens into text piece by piece, without splitting a character."""

    def add(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class TextStream:
    """The text of one request.

    Text that may be the beginning of a stop string is held back, so that what was given out never has to be taken
    back. The stop string whose end comes first wins; hence the result does not depend on where tokens begin and end.

    Attributes:
        text: what is given out so far.
        stopped_by: the stop string that was met, or ``None``. After it, nothing may be added.
    """

    def __init__(self, detokenizer: Detokenizer, stop: Sequence[str] = ()) -> None:
        self.text = ""
        self.stopped_by: str | None = None
        self._detokenizer = detokenizer
        self._stop = stop
        self._longest = max(map(len, stop), default=0)
        self._held = ""

    def add(self, token_id: int) -> None:
        self._extend(self._detokenizer.add(token_id))

    def flush(self) -> None:
        """Give out what is left at the end: an incomplete character, and text that became no stop string."""
        self._extend(self._detokenizer.flush())
        self.text += self._held
        self._held = ""

    def _extend(self, piece: str) -> None:
        if not self._stop:
            self.text += piece
            return
        # A stop string that ends in the new piece begins in it or in the held text, which is a prefix of one.
        window = self._held + piece
        found = [(start + len(stop), start, stop) for stop in self._stop if (start := window.find(stop)) >= 0]
        if found:
            _, start, self.stopped_by = min(found)
            self.text += window[:start]
            self._held = ""
            return
        split = len(window) - self._num_held(window)
        self.text += window[:split]
        self._held = window[split:]

    def _num_held(self, window: str) -> int:
        """Length of the longest end of the window that a stop string begins with."""
        for length in range(min(self._longest - 1, len(window)), 0, -1):
            if any(stop.startswith(window[-length:]) for stop in self._stop):
                return length
        return 0
