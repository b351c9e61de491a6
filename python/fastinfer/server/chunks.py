"""Chunks of a streamed chat."""

from typing import Any

import orjson

from fastinfer.server.sse import frame


class Chunks:
    """Writes chunks, those of plain text from constant bytes, which takes a quarter of the time.

    Args:
        head: fields that all chunks have.
        usage_null: whether chunks have the field ``usage``, of which only the last one has a value.
    """

    def __init__(self, head: dict[str, Any], *, usage_null: bool) -> None:
        self._head = head
        self._extra: dict[str, Any] = {"usage": None} if usage_null else {}
        self._before: bytes = b"data: " + orjson.dumps(head)[:-1] + b',"choices":[{"index":'
        end = b',"usage":null}\n\n' if usage_null else b"}\n\n"
        self._after = b'},"logprobs":null,"finish_reason":null}]' + end

    def text(self, index: int, text: str) -> bytes:
        """Return a chunk of text."""
        return b'%b%d,"delta":{"content":%b%b' % (self._before, index, orjson.dumps(text), self._after)

    def any(self, index: int, delta: dict[str, Any], details: dict[str, Any] | None = None, **fields: Any) -> bytes:
        """Return a chunk with further fields of the choice and of the chunk."""
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None} | (details or {})
        return frame({**self._head, "choices": [choice], **self._extra, **fields})
