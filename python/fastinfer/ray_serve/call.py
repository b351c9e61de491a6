"""A request as it goes from the gateway to an engine, and the answer as it comes back."""

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message

from fastinfer.client.endpoint import Headers
from fastinfer.server.router.prompts import NO_PROMPT, Prompt

# Smallest time between two pieces of an answer. Ray needs about half a millisecond of CPU time for each.
MIN_INTERVAL_S = 0.02
# What follows the last message of an application.
END: Message = {"type": "end"}


@dataclass(frozen=True)
class Call:
    """A request to an engine.

    Attributes:
        method: its method.
        path: its path, with the query.
        headers: its headers.
        body: its body.
        prompt: its prompt, for the choice of a replica; it stays in the gateway.
    """

    method: str
    path: str
    headers: Headers
    body: bytes
    prompt: Prompt = field(default=NO_PROMPT, repr=False)

    def __reduce__(self) -> tuple[type["Call"], tuple[str, str, Headers, bytes]]:
        return Call, (self.method, self.path, self.headers, self.body)

    def scope(self) -> dict[str, Any]:
        """Return the ASGI scope."""
        path, _, query = self.path.partition("?")
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "scheme": "http",
            "method": self.method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode("latin-1"),
            "root_path": "",
            "headers": [(name.lower(), value) for name, value in self.headers],
            "client": None,
            "server": None,
        }


@dataclass(frozen=True)
class Piece:
    """A piece of an answer; status and headers count in the first one alone.

    Attributes:
        body: the next bytes of the body.
        status: status of the answer.
        headers: its headers.
    """

    body: bytes
    status: int = 200
    headers: tuple[tuple[bytes, bytes], ...] = ()


async def pieces_of(app: ASGIApp, call: Call) -> AsyncGenerator[Piece, None]:
    """Give the answer of an application in this process; what comes in quick succession is joined.

    If the generator is closed, the call is cancelled.

    Raises:
        RuntimeError: the application has not ended its answer.
    """
    messages: asyncio.Queue[Message] = asyncio.Queue()
    requests: asyncio.Queue[Message] = asyncio.Queue()
    requests.put_nowait({"type": "http.request", "body": call.body, "more_body": False})
    # The client's end is the end of this task: no message announces it.
    task = asyncio.ensure_future(app(call.scope(), requests.get, messages.put))
    task.add_done_callback(lambda _: messages.put_nowait(END))
    try:
        is_whole = False
        while not is_whole:
            received = [await messages.get()]
            began = time.monotonic()
            while not messages.empty():
                received.append(messages.get_nowait())
            is_whole = any(map(_is_last, received))
            if received[-1] is END and not is_whole:
                task.result()
                raise RuntimeError(f"{call.path}: the application has not ended its answer")
            start, body = received[0], b"".join(message.get("body", b"") for message in received)
            yield Piece(body, start.get("status", 200), tuple(start.get("headers", ())))
            if not is_whole:
                await asyncio.wait([task], timeout=began + MIN_INTERVAL_S - time.monotonic())
    finally:
        task.cancel()
        await asyncio.wait([task])


def _is_last(message: Message) -> bool:
    return message["type"] == "http.response.body" and not message.get("more_body", False)
