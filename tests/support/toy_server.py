"""A server on the toy model: in this process without a socket, or on a free port of 127.0.0.1."""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
from fastapi import FastAPI

from fastinfer import AsyncEngine
from fastinfer.engine.engine import Engine
from fastinfer.server.app import create_app
from fastinfer.server.config import ServerConfig
from fastinfer.server.draining_server import DrainingServer
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

    def step_until(self, condition: Callable[[], Any], max_steps: int = 50) -> None:
        """Allow one step after the other until something is true: requests are queued between two steps."""
        for _ in range(max_steps):
            self.allow(1)
            deadline = time.monotonic() + 0.2
            while time.monotonic() < deadline:
                if condition():
                    return
                time.sleep(0.002)
        raise AssertionError("it did not happen")


def toy_app(
    model: ToyModel | None = None,
    limits: dict[str, Any] | None = None,
    engine: Callable[[], Engine] | None = None,
    names: tuple[str, ...] = (NAME, "toy"),
    **settings: Any,
) -> FastAPI:
    # Equal requests are computed each, unless a test asks for the cache.
    settings = {"response_cache": "off"} | settings
    config = ServerConfig(model_names=names, port=0, **settings)
    load = engine or (lambda: toy_engine(model=model, **(limits or {})))
    return create_app(config, lambda: AsyncEngine(load()))


@contextlib.asynccontextmanager
async def toy_client(
    model: ToyModel | None = None,
    limits: dict[str, Any] | None = None,
    engine: Callable[[], Engine] | None = None,
    **settings: Any,
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the application in this process; the engine is checked for requests left behind."""
    app = toy_app(model, limits, engine, **settings)
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
    model: ToyModel | None = None,
    limits: dict[str, Any] | None = None,
    engine: Callable[[], Engine] | None = None,
    **settings: Any,
) -> Iterator[tuple[DrainingServer, str]]:
    """A server in a thread, and its address."""
    app = toy_app(model, limits, engine, **settings)
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
