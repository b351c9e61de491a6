"""The application: routes, middleware, and the life of the engine."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

import fastinfer
from fastinfer.async_engine import AsyncEngine
from fastinfer.errors import FastinferError, QueueFullError, UnavailableError
from fastinfer.server.caching import make_cache
from fastinfer.server.config import ServerConfig
from fastinfer.server.disconnect import ClientGoneError
from fastinfer.server.engine_host import EngineHost
from fastinfer.server.errors import APIError, as_api_error, error_response
from fastinfer.server.logs import log_request
from fastinfer.server.metrics import Metrics
from fastinfer.server.middleware import add_middleware
from fastinfer.server.openapi import add_bodies
from fastinfer.server.output_format import find_format
from fastinfer.server.routes import (
    admin,
    chat,
    completions,
    embeddings,
    health,
    messages,
    models,
    page,
    responses,
    tokens,
)
from fastinfer.server.state import ServerState, server_of

ROUTES = (chat, responses, messages, completions, embeddings, tokens, models, health, admin, page)


def create_app(config: ServerConfig, load: Callable[[], AsyncEngine]) -> FastAPI:
    """Return the application; the engine is loaded while it runs.

    Args:
        config: the server's settings.
        load: function that loads the engine; it runs in a thread. The engine is shut down with the application.
    """

    def load_all() -> AsyncEngine:
        engine = load()
        server.output_format = find_format(engine.tokenizer, config.tool_call_parser, config.reasoning_parser)
        return engine

    host = EngineHost(load_all, config.stall_s)
    cache = make_cache(config, host)
    server = ServerState(config, host, Metrics(config.metrics_prefix, config.model_names[0]), cache)
    if cache is not None:
        server.metrics.watch_stores(cache.stats)

    observers = [server.metrics.answered, log_request]
    tracing = None
    if config.otlp_traces_endpoint is not None:
        from fastinfer.server.tracing import Tracing  # which needs further packages

        tracing = Tracing(config.otlp_traces_endpoint)
        observers.append(tracing.trace_request)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        loading = asyncio.create_task(_load(server))
        yield
        host.begin_drain()
        await loading
        await host.stop()
        if cache is not None:
            await cache.close()
        if tracing is not None:
            await tracing.close()

    # The pages for trying the interface load scripts from other hosts.
    app = FastAPI(
        title="fastinfer",
        version=fastinfer.__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.server = server
    for routes in ROUTES:
        app.include_router(routes.router)
    add_bodies(app)
    for kind in (APIError, FastinferError, UnavailableError, HTTPException, ClientGoneError):
        app.add_exception_handler(kind, _answer)
    add_middleware(app, config, host, observers)
    return app


async def _load(server: ServerState) -> None:
    await server.host.start()
    if server.host.loaded is not None:
        server.metrics.watch(server.host.loaded)


async def _answer(request: Request, error: Exception) -> Response:
    """Return the answer to an error that a route has raised."""
    if isinstance(error, ClientGoneError):
        return Response(status_code=499)  # nginx's number for this; nobody reads it
    if isinstance(error, HTTPException):
        message = f"{request.method} {request.url.path}: {error.detail}"
        error = APIError(error.status_code, message, headers=error.headers)
    answer = as_api_error(error, request.scope.get("names"))
    if isinstance(error, QueueFullError) or answer.status == 503:
        server_of(request).metrics.reject(answer.code or "unavailable")
    return error_response(answer, request.scope)
