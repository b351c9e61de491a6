"""A streamed answer of a server: what arrived when."""

import itertools
from dataclasses import dataclass, field
from typing import Any

from fastinfer.client.answers import DONE, parse_chunk
from fastinfer.client.events import EventParser
from fastinfer.errors import ServerError
from fastinfer.utils.checks import show

TEXT_FIELDS = ("content", "reasoning_content", "reasoning")


@dataclass
class Recording:
    """An answer as the load generator sees it; it is parsed after the run, so that parsing delays no other stream.

    Attributes:
        sent_s: time when the request was sent.
        reads: time and bytes of each read of the answer's body.
        end_s: time when the answer was complete.
    """

    sent_s: float
    reads: list[tuple[float, bytes]] = field(default_factory=list)
    end_s: float = 0.0


@dataclass(frozen=True)
class ServedAnswer:
    """A complete answer.

    Attributes:
        sent_s: time when the request was sent.
        moments: time of each output, a read of the socket that brings text.
        prompt_tokens, new_tokens: the server's own counts.
    """

    sent_s: float
    moments: list[float]
    prompt_tokens: int
    new_tokens: int

    @classmethod
    def parse(cls, recording: Recording) -> "ServedAnswer":
        """Parse a recording.

        Raises:
            ServerError: the answer is an error, is not complete, has no text, or does not say how many tokens it has.
        """
        events, is_done = EventParser(), False
        usage: object = None
        moments: list[float] = []
        for moment, data in recording.reads:
            has_text = False
            for event in events.push(data):
                if event == DONE:
                    is_done = True
                    continue
                chunk = parse_chunk(event)
                has_text = has_text or _has_text(chunk)
                usage = chunk.get("usage") or usage
            if has_text:
                moments.append(moment)
        if not is_done:
            raise ServerError("the server's stream ended without [DONE]")
        if not usage:
            raise ServerError("expected the token counts that stream_options.include_usage asks for, got none")
        if not moments:
            raise ServerError("expected text, got an empty answer")
        return cls(recording.sent_s, moments, _count(usage, "prompt_tokens"), _count(usage, "completion_tokens"))

    @property
    def first_token_s(self) -> float:
        """Seconds from sending the request to the first text."""
        return self.moments[0] - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between successive outputs, for which a reader of the stream waits."""
        return [after - before for before, after in itertools.pairwise(self.moments)]

    @property
    def per_token_s(self) -> float | None:
        """Mean seconds per token after the first; ``None`` if there is one alone, or the whole answer came at once."""
        if self.new_tokens == 1 or len(self.moments) == 1:
            return None
        return (self.moments[-1] - self.moments[0]) / (self.new_tokens - 1)


def _count(usage: object, name: str) -> int:
    """Return one of the server's token counts, which is at least 1: the request had a prompt and got text."""
    count = usage.get(name) if isinstance(usage, dict) else None
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ServerError(f"expected the server's usage to have {name} of at least 1, got {show(usage)}")
    return count


def _has_text(chunk: dict[str, Any]) -> bool:
    """Return whether a chunk of a chat or of a completion has text."""
    choices = chunk.get("choices") or []
    parts = [choice.get("delta") or {"content": choice.get("text")} for choice in choices]
    return any(part.get(name) for part in parts for name in TEXT_FIELDS)
