"""Server-sent events: frames of constant bytes around the text, pings, and the end of a stream."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from fastinfer.server.disconnect import disconnected
from fastinfer.server.errors import APIError, as_api_error
from fastinfer.server.json_bytes import dumps
from fastinfer.server.record import record

LOG = logging.getLogger("fastinfer.server")

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would collect the stream
}


def frame(content: Any) -> bytes:
    """Return a frame without a name."""
    return b"data: %b\n\n" % dumps(content)


def named_frame(name: str, content: Any) -> bytes:
    """Return a frame with the name of its event, as the interfaces of responses and messages have it."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), dumps(content))


def openai_error(error: APIError) -> bytes:
    """Return the frames that end a stream in which something failed; clients raise on a top-level ``error``."""
    return frame(error.body()) + DONE


class EventStream(Response):
    """A stream of frames to one client.

    The answer begins with the first frames, so that an error before them still gets a status of its own, or with the
    first ping. Each item is one write. While a client is slow the generator is not asked for more; the engine's outputs
    are merged meanwhile.

    Args:
        frames: generator of bytes, each item one or more whole frames. It is closed however the stream ends, which
            must abort its request.
        failure: function from an error to the frames that report it.
        ping_interval_s: seconds without output after which a comment is sent.
        write_timeout_s: seconds after which a client that takes nothing more is cut off.
    """

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        *,
        failure: Callable[[APIError], bytes] = openai_error,
        ping_interval_s: float = 15.0,
        write_timeout_s: float = 60.0,
    ) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._frames = frames
        self._failure = failure
        self._ping_interval_s = ping_interval_s
        self._write_timeout_s = write_timeout_s
        self._has_begun = self._is_quiet = False
        self._write_began: float | None = None
        self._beginning = asyncio.Lock()  # a ping and a frame must not both begin the answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send = send
        self._names = scope.get("names")
        # The frames have a task of their own: each time a task goes on, all coroutines that it is inside of take their
        # time, and here the framework and the middleware are twenty of them.
        pump = asyncio.ensure_future(self._pump())
        gone = asyncio.ensure_future(disconnected(receive))
        try:
            is_over = await self._watch(pump, gone)
        finally:
            gone.cancel()
            if not pump.done():
                pump.cancel()
                await asyncio.wait([pump])
        if not is_over:
            record().error = "client_gone"
            # Closing the connection would wait until the client has taken what is buffered.
            scope.get("abort", _nothing)()
            return
        pump.result()
        await send({"type": "http.response.body", "body": b""})

    async def _pump(self) -> None:
        """Write the frames; an error before the first one is raised."""
        try:
            async with contextlib.aclosing(self._frames) as frames:
                async for data in frames:
                    await self._write(data)
        except Exception as error:
            if not self._has_begun:
                raise
            answer = as_api_error(error, self._names)
            record().error = answer.name
            await self._write(self._failure(answer))

    async def _write(self, data: bytes) -> None:
        self._write_began, self._is_quiet = time.monotonic(), False
        if not self._has_begun:
            async with self._beginning:
                if not self._has_begun:
                    await self._send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    self._has_begun = True
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self._write_began = None

    async def _watch(self, pump: asyncio.Future[None], gone: asyncio.Future[None]) -> bool:
        """Send pings while there is no output; return False if the client goes away or takes nothing more."""
        while True:
            self._is_quiet = True
            await asyncio.wait([pump, gone], timeout=self._ping_interval_s, return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                return True
            blocked_since = self._write_began
            if gone.done() or (blocked_since and time.monotonic() - blocked_since > self._write_timeout_s):
                return False
            if self._is_quiet and blocked_since is None:
                try:
                    await asyncio.wait_for(self._write(PING), self._write_timeout_s)
                except asyncio.TimeoutError:
                    return False


def _nothing() -> None:
    pass
