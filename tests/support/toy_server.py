"""A server on the toy model: in this process without a socket, or on a free port of 127.0.0.1."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
from fastapi import FastAPI

from fastinfer import AsyncEngine
from fastinfer.server.app import create_app
from fastinfer.server.config import ServerConfig
from fastinfer.server.run import DrainingServer
from support.toy import ToyModel, toy_engine

NAME = "org/toy"


class GatedModel(ToyModel):
    """Computes a step for each permit."""

    def __init__(self) -> None:
        super().__init__()
        self.permits = threading.Semaphore(0)

    def forward(self, *args: Any) -> Any:
        assert self.permits.acquire(timeout=60)
        return super().forward(*args)

    def allow(self, count: int) -> None:
        for _ in range(count):
            self.permits.release()


def toy_app(model: ToyModel | None = None, limits: dict[str, Any] | None = None, **settings: Any) -> FastAPI:
    config = ServerConfig(model_names=(NAME, "toy"), port=0, **settings)
    return create_app(config, lambda: AsyncEngine(toy_engine(model=model, **(limits or {}))))


@contextlib.asynccontextmanager
async def toy_client(
    model: ToyModel | None = None, limits: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the application in this process; the engine is checked for requests left behind."""
    app = toy_app(model, limits, **settings)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False, root_path=settings.get("root_path", ""))
    async with app.router.lifespan_context(app):
        while app.state.server.host.state.value == "loading":
            await asyncio.sleep(0.001)
        async with httpx.AsyncClient(transport=transport, base_url="http://toy", timeout=30) as client:
            yield client
        engine = app.state.server.host.loaded
        while engine._mailboxes:
            await asyncio.sleep(0.001)
        manager = engine._engine.block_manager
        assert manager.num_free + manager.num_cached == manager.num_blocks


@contextlib.contextmanager
def toy_server(
    model: ToyModel | None = None, limits: dict[str, Any] | None = None, **settings: Any
) -> Iterator[tuple[DrainingServer, str]]:
    """A server in a thread, and its address."""
    app = toy_app(model, limits, **settings)
    server = DrainingServer(app, app.state.server.config)
    thread = threading.Thread(target=server.run)
    thread.start()
    pause = threading.Event()
    try:
        while not server.started or server.host.state.value == "loading":
            pause.wait(0.01)
        yield server, server.address
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()
