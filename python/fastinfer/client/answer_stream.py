"""One streamed request of a chat, as pieces of text."""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

from fastinfer.client.answers import DONE, check_status, model_names, parse_chunk
from fastinfer.client.connection import Connection
from fastinfer.client.endpoint import Endpoint
from fastinfer.client.events import EventParser
from fastinfer.errors import ServerError


async def list_models(endpoint: Endpoint) -> list[str]:
    """Return the names of the models that a server lists.

    Raises:
        FastinferError: the server cannot be reached, refuses, or lists none.
    """
    parts: list[bytes] = []
    connection = await Connection.open(endpoint)
    try:
        status = await connection.request("GET", "/models", b"", parts.append)
    finally:
        connection.close()
    body = b"".join(parts)
    check_status(status, body)
    return model_names(body)


async def stream_deltas(endpoint: Endpoint, request: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
    """Send a chat and yield the ``delta`` objects of the answer's first choice.

    Closing the generator closes the connection, so that the server gives up the request.

    Args:
        endpoint: the server.
        request: the body for ``/chat/completions``; ``stream`` is added.

    Raises:
        FastinferError: the server cannot be reached, refuses the request, or fails before the end of its answer.
    """
    connection = await Connection.open(endpoint)
    pieces: asyncio.Queue[bytes | None] = asyncio.Queue()
    body = json.dumps({**request, "stream": True}).encode()
    answer = asyncio.ensure_future(connection.request("POST", "/chat/completions", body, pieces.put_nowait))
    answer.add_done_callback(lambda _: pieces.put_nowait(None))
    events, received, is_done = EventParser(), b"", False
    try:
        while (piece := await pieces.get()) is not None:
            if connection.status != 200:
                received += piece
                continue
            for event in events.push(piece):
                if event == DONE:
                    is_done = True
                    continue
                for choice in parse_chunk(event).get("choices") or []:
                    if choice.get("index", 0) == 0 and isinstance(choice.get("delta"), dict):
                        yield choice["delta"]
        check_status(await answer, received)
        if not is_done:
            raise ServerError("the server's stream ended without [DONE]")
    finally:
        answer.cancel()
        connection.close()
