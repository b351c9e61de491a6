"""Plain answers end with their clients: a request whose client has gone is cancelled."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Receive

Result = TypeVar("Result")


class ClientGoneError(Exception):
    """The client has closed the connection; nobody reads the answer."""


async def unless_gone(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Run the work of a request whose body has been read; cancel it if the client goes away.

    ASGI servers let the handler of a plain answer run to its end, whether anybody waits for it or not.

    Raises:
        ClientGoneError: the client has gone.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(disconnected(request.receive))
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait([task])


async def disconnected(receive: Receive) -> None:
    """Return when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
