"""Server-sent events: frames of constant bytes around the text, pings, and the end of a stream."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from fastinfer.server.errors import APIError, as_api_error

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
    return b"data: %b\n\n" % orjson.dumps(content)


def named_frame(name: str, content: Any) -> bytes:
    """Return a frame with the name of its event, as the interfaces of responses and messages have it."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps(content))


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
        self._is_cut = False
        self._lock = asyncio.Lock()  # a ping and a frame must not both begin the answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send = send
        loop = asyncio.get_running_loop()
        pump = asyncio.current_task()
        assert pump is not None
        watcher = loop.create_task(self._watch(receive, pump))
        try:
            async with contextlib.aclosing(self._frames) as frames:
                async for data in frames:
                    await self._write(data)
        except asyncio.CancelledError:
            if not self._is_cut:
                raise
            # Closing the connection would wait until the client has taken what is buffered.
            scope.get("abort", _nothing)()
            return
        except Exception as error:
            if not self._has_begun:
                raise
            await self._write(self._failure(as_api_error(error)))
        finally:
            watcher.cancel()
        await send({"type": "http.response.body", "body": b""})

    async def _write(self, data: bytes) -> None:
        async with self._lock:
            self._write_began, self._is_quiet = asyncio.get_running_loop().time(), False
            if not self._has_begun:
                self._has_begun = True
                await self._send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._send({"type": "http.response.body", "body": data, "more_body": True})
            self._write_began = None

    async def _watch(self, receive: Receive, pump: asyncio.Task[Any]) -> None:
        """Cancel the stream when the client has gone or takes nothing more; send pings while there is no output."""
        loop = asyncio.get_running_loop()
        disconnect = loop.create_task(_disconnected(receive))
        try:
            while True:
                self._is_quiet = True
                await asyncio.wait([disconnect], timeout=self._ping_interval_s)
                blocked_since = self._write_began
                if disconnect.done() or (blocked_since and loop.time() - blocked_since > self._write_timeout_s):
                    self._is_cut = True
                    pump.cancel()
                    return
                if self._is_quiet and blocked_since is None:
                    await self._write(PING)
        finally:
            disconnect.cancel()


def _nothing() -> None:
    pass


async def _disconnected(receive: Receive) -> None:
    """Return when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
