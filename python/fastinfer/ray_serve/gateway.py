"""The gateway: the router of ``fastinfer router`` in front of a deployment of Ray Serve."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, RayServeException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fastinfer.client.endpoint import Headers
from fastinfer.errors import ServerError
from fastinfer.ray_serve.call import Call, Piece
from fastinfer.server.errors import RETRY_FULL_S, APIError, unavailable
from fastinfer.server.logs import logging_to
from fastinfer.server.router.app import create_app
from fastinfer.server.router.config import RouterConfig
from fastinfer.server.router.host import RouterHost
from fastinfer.server.router.prompts import NO_PROMPT, Prompt
from fastinfer.server.router.replica import Replica
from fastinfer.server.router.routes import BROADCAST

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

RETRY_S = 0.5


class Gateway:
    """The deployment that takes HTTP requests.

    Args:
        engines: handle of the engines.
        config: settings of the router.
        log_format, log_level: see :func:`~fastinfer.server.logs.logging_to`.
    """

    def __init__(self, engines: "DeploymentHandle", config: RouterConfig, log_format: str, log_level: str) -> None:
        self._engines = engines.options(stream=True, method_name="answer")
        self._config = config
        self._context = contextlib.ExitStack()
        self._context.enter_context(logging_to(None, log_format, log_level))

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return without_request_id(create_app(self._config, EnginesHost(self._config, self._engines)))


def without_request_id(app: ASGIApp) -> ASGIApp:
    """Return an application whose answers leave ``X-Request-Id`` to Ray's proxy, which has sent the same one."""

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_without(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [header for header in message["headers"] if header[0].lower() != b"x-request-id"]
                message = {**message, "headers": headers}
            await send(message)

        await app(scope, receive, send_without)

    return wrapped


class EnginesHost(RouterHost):
    """Replicas that Ray looks after: for the router they are one, which is always ready.

    Args:
        config: the router's settings.
        engines: handle of the engines.
    """

    def __init__(self, config: RouterConfig, engines: "DeploymentHandle") -> None:
        super().__init__(config, ())
        self.replicas.append(Engines(engines, config.max_index_blocks))

    async def start(self) -> None:
        """Ask nobody: Ray does."""

    async def wait_for(self, prompt: Prompt) -> Replica | None:
        """Return the engines, after a pause; Ray holds the request until one of them takes it."""
        await asyncio.sleep(RETRY_S)
        return None if self.is_stopped else self.replicas[0]


class Engines(Replica):
    """All engines. Which one gets a request says :class:`~fastinfer.ray_serve.prefix_router.PrefixRouter`.

    Args:
        handle: handle of the engines.
        max_index_blocks: size of the index of their prefixes.
    """

    def __init__(self, handle: "DeploymentHandle", max_index_blocks: int) -> None:
        super().__init__("engines", max_index_blocks)
        self._handle = handle
        self.set_ready()

    def set_unready(self, reason: str, *, is_reachable: bool = True) -> None:
        """Ignore the state of one engine; the next request may go to another one."""

    def lose(self, reason: str) -> None:
        """Ignore the loss of one engine, of which Ray knows."""

    @contextlib.asynccontextmanager
    async def ask(
        self, method: str, path: str, headers: Headers, body: bytes, prompt: Prompt = NO_PROMPT
    ) -> AsyncIterator["EngineAnswer"]:
        """Send a request to an engine, and give the answer once it has begun.

        Raises:
            APIError: the request is for all engines, or too many wait.
            ServerError: the engine is lost.
        """
        if (route := path.partition("?")[0]) in BROADCAST:
            raise APIError(404, f"{route} would reach one engine; with Ray Serve, change the application's options")
        answer = EngineAnswer(self._handle.remote(Call(method, path, tuple(headers), body, prompt)))
        try:
            await answer.begin()
            yield answer
        finally:
            answer.close()

    def close(self) -> None:
        """Leave the engines to Ray."""


class EngineAnswer:
    """An answer of an engine.

    Args:
        pieces: its pieces.

    Attributes:
        status: its status, once it has begun.
        headers: its headers.
    """

    def __init__(self, pieces: "DeploymentResponseGenerator[Piece]") -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self._pieces = pieces
        self._first = b""
        self._has_ended = False

    async def begin(self) -> None:
        """Wait for the first piece.

        Raises:
            APIError: too many requests wait.
            ServerError: the engine is lost.
        """
        piece = await self._next()
        if piece is None:
            raise ServerError("an engine has answered nothing")
        self.status, self.headers, self._first = piece.status, list(piece.headers), piece.body

    async def read(self) -> bytes:
        """Return the next piece of the body; empty at its end.

        Raises:
            ServerError: the engine is lost.
        """
        while not self._first:
            piece = await self._next()
            if piece is None:
                return b""
            self._first = piece.body
        body, self._first = self._first, b""
        return body

    def close(self) -> None:
        """Give the request up if there is more to come."""
        if not self._has_ended:
            self._pieces.cancel()

    async def _next(self) -> Piece | None:
        try:
            return await anext(self._pieces)
        except StopAsyncIteration:
            self._has_ended = True
            return None
        except BackPressureError:
            raise unavailable("the queue is full", RETRY_FULL_S, "queue_full") from None
        except (RayError, RayServeException) as error:
            self._has_ended = True
            raise ServerError(f"an engine has lost a request: {type(error).__name__}") from None
