"""Delivery of outputs from the engine's thread to a task of an event loop."""

import asyncio
import contextlib
import secrets
import threading
from concurrent.futures import Future
from typing import Generic

from fastinfer.outputs import Output, merge


class Mailbox(Generic[Output]):
    """Carries the outputs of one request from the engine's thread to an event loop.

    It holds at most one output: an output that is not fetched before the next one arrives is merged into it.

    Attributes:
        request_id: id of the request, random by default.
        is_queued: whether the engine has the request.
        is_abandoned: whether nobody will fetch outputs any more.
        preparation: the preparation of the request in another thread, after which it is queued.
    """

    preparation: Future[None]

    def __init__(self, request_id: str | None = None) -> None:
        self.request_id = secrets.token_hex(8) if request_id is None else request_id
        self.is_queued = False
        self.is_abandoned = False
        self._loop = asyncio.get_running_loop()
        self._is_accepted = asyncio.Event()
        self._is_filled = asyncio.Event()
        self._lock = threading.Lock()
        self._content: Output | BaseException | None = None

    def accept(self) -> None:
        """Report that the request is queued; called by the engine's thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._is_accepted.set)

    async def accepted(self) -> None:
        """Wait until the request is queued, or raise the error that came instead; called in the event loop."""
        await self._is_accepted.wait()
        with self._lock:
            content = self._content
        if isinstance(content, BaseException):
            raise content

    def put(self, content: Output | BaseException) -> bool:
        """Store an output or an error; called by the engine's thread. Returns False if the event loop is closed."""
        if self._loop.is_closed():
            return False
        with self._lock:
            missed = self._content
            if isinstance(missed, BaseException) or isinstance(content, BaseException):
                self._content = content
            else:
                self._content = merge(missed, content)
        if isinstance(content, BaseException):
            self.accept()  # wake up who waits for that
        if missed is None:
            with contextlib.suppress(RuntimeError):  # the loop has been closed since the check above
                self._loop.call_soon_threadsafe(self._is_filled.set)
        return True

    async def get(self) -> Output:
        """Wait for an output and return it, or raise the error that came instead; called in the event loop."""
        await self._is_filled.wait()
        with self._lock:
            content, self._content = self._content, None
        # A later put() sets the event again, but only after this callback of the loop has ended.
        self._is_filled.clear()
        assert content is not None
        if isinstance(content, BaseException):
            raise content
        return content
