"""A replica of Ray Serve: an engine behind the same HTTP application as that of ``fastinfer serve``."""

import argparse
import asyncio
import contextlib
from collections.abc import AsyncGenerator

from fastinfer.cli.serve import load, server_config
from fastinfer.ray_serve.call import Call, Piece, pieces_of
from fastinfer.server.app import create_app
from fastinfer.server.host_state import HostState
from fastinfer.server.logs import logging_to
from fastinfer.server.state import ServerState
from fastinfer.utils.torch_threads import set_num_threads

POLL_S = 0.05


class Engine:
    """A replica of Ray Serve.

    Args:
        options: options of ``fastinfer serve``.

    Raises:
        Exception: the error with which loading the model failed.
    """

    async def __init__(self, options: argparse.Namespace) -> None:  # type: ignore[misc]  # Ray awaits it
        set_num_threads(options.threads)
        self._context = contextlib.AsyncExitStack()
        # The gateway has a line per request.
        level = "warning" if options.log_level == "info" else options.log_level
        self._context.enter_context(logging_to(None, options.log_format, level))
        self._app = create_app(server_config(options), lambda: load(options))
        await self._context.enter_async_context(self._app.router.lifespan_context(self._app))
        state: ServerState = self._app.state.server
        self._host = state.host
        while self._host.state is HostState.LOADING:
            await asyncio.sleep(POLL_S)
        if self._host.failure is not None:
            raise self._host.failure

    async def answer(self, call: Call) -> AsyncGenerator[Piece, None]:
        """Answer a request, piece by piece."""
        async for piece in pieces_of(self._app, call):
            yield piece

    def check_health(self) -> None:
        """Say whether the replica works; Ray asks every few seconds, and starts another one if it does not.

        Raises:
            RuntimeError: only a restart helps.
        """
        if (illness := self._host.illness()) is not None:
            raise RuntimeError(illness)

    async def __del__(self) -> None:
        """End the engine; Ray calls this once no request runs, or when their time is up."""
        await self._context.aclose()
