"""Turns generated tokens into text, up to a stop string."""

from collections.abc import Iterable
from typing import Protocol

from fastinfer.engine.stop_strings import StopStringMatcher


class Detokenizer(Protocol):
    """Turns tokens into text piece by piece, without splitting a character."""

    def add(self, token_id: int) -> str:
        """Append a token, and return the characters that it completes."""

    def flush(self) -> str:
        """Return what is left of an incomplete character."""


class TextStream:
    """The text of one completion, as far as the user may see it.

    Args:
        detokenizer: turns the completion's tokens into text.
        stop: strings that end the text.
        includes_stop: whether the string that ends the text is a part of it.
        min_tokens: number of tokens at the start in whose text no stop string ends, as in vLLM.

    Attributes:
        stopped_by: the stop string that ended the text, or ``None``; after one no tokens may be added.
        utf8: the text so far in UTF-8, without the part that may be the beginning of a stop string. It only grows at
            its end, which for a bytearray takes the same time at any length.
    """

    def __init__(
        self, detokenizer: Detokenizer, stop: Iterable[str] = (), includes_stop: bool = False, min_tokens: int = 0
    ) -> None:
        self.stopped_by: str | None = None
        self.utf8 = bytearray()
        self._detokenizer = detokenizer
        strings = tuple(stop)
        self._stop = StopStringMatcher(strings, includes_stop) if strings else None
        self._num_early = min_tokens  # tokens to come in whose text no stop string ends

    def add(self, token_id: int) -> None:
        """Append the text of a token."""
        text = self._detokenizer.add(token_id)
        if self._stop is not None:
            text = self._match(self._stop, text, may_end=not self._num_early)
            self._num_early = max(0, self._num_early - 1)
        self.utf8 += text.encode()

    def flush(self) -> None:
        """Append the rest at the end of the text: an incomplete character, and text that became no stop string."""
        text = self._detokenizer.flush()
        if self._stop is not None:
            text = self._match(self._stop, text, may_end=not self._num_early) + self._stop.flush()
        self.utf8 += text.encode()

    def _match(self, stop: StopStringMatcher, text: str, may_end: bool) -> str:
        """Look for stop strings in more text, and return the text that is released."""
        released = stop.add(text, may_end)
        self.stopped_by = stop.matched
        return released
