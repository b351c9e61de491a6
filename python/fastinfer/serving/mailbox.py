"""How outputs come from the engine's thread to a task of an event loop."""

import asyncio
import contextlib
import secrets
import threading
from dataclasses import replace
from typing import Any, Generic, TypeVar

from fastinfer.outputs import PrefillOutput, RequestOutput

Output = TypeVar("Output", RequestOutput, PrefillOutput)


class Mailbox(Generic[Output]):
    """Carries outputs from the engine's thread to an event loop. It holds at most one: what is not fetched in time is
    merged into the next.

    Attributes:
        request_id: whose; random unless given.
        is_abandoned: nobody will fetch anything any more.
    """

    def __init__(self, request_id: str | None = None) -> None:
        self.request_id = secrets.token_hex(8) if request_id is None else request_id
        self.is_abandoned = False
        self._loop = asyncio.get_running_loop()
        self._is_filled = asyncio.Event()
        self._lock = threading.Lock()
        self._content: Output | Exception | None = None

    def put(self, content: Output | Exception) -> bool:
        """From the engine's thread; returns whether there still is a loop in which somebody could fetch it."""
        if self._loop.is_closed():
            return False
        with self._lock:
            was_empty = self._content is None
            self._content = _merged(self._content, content)
        if was_empty:
            with contextlib.suppress(RuntimeError):  # closed this very moment
                self._loop.call_soon_threadsafe(self._is_filled.set)
        return True

    async def get(self) -> Output:
        """In the loop: wait for an output, or raise the error that came instead."""
        await self._is_filled.wait()
        with self._lock:
            content, self._content = self._content, None
        # What is put from now on sets the event anew, but not before this callback of the loop has ended.
        self._is_filled.clear()
        assert content is not None
        if isinstance(content, Exception):
            raise content
        return content


def _merged(missed: Any, output: Any) -> Any:
    """An output with the deltas of the one before it, which nobody has read."""
    if not isinstance(missed, RequestOutput) or not isinstance(output, RequestOutput):
        return output
    pairs = zip(missed.outputs, output.outputs, strict=True)
    return replace(output, outputs=[replace(new, delta=old.delta + new.delta) for old, new in pairs])
