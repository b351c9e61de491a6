"""The application of the router."""

import contextlib
from collections.abc import AsyncIterator

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

import fastinfer
from fastinfer.server.disconnect import ClientGoneError
from fastinfer.server.errors import APIError, error_response
from fastinfer.server.logs import log_request
from fastinfer.server.middleware import add_middleware
from fastinfer.server.router import routes
from fastinfer.server.router.config import RouterConfig
from fastinfer.server.router.host import RouterHost
from fastinfer.server.router.metrics import RouterMetrics
from fastinfer.server.router.state import RouterState


def create_app(config: RouterConfig, host: RouterHost) -> FastAPI:
    """Return the application of a router.

    Args:
        config: the router's settings.
        host: the replicas, which are watched while the application runs.
    """

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await host.start()
        yield
        host.begin_drain()
        await host.stop()

    state = RouterState(config, host, RouterMetrics(host))
    app = FastAPI(
        title="fastinfer router",
        version=fastinfer.__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    app.state.server = state
    app.include_router(routes.router)
    for kind in (APIError, HTTPException, ClientGoneError):
        app.add_exception_handler(kind, _answer)
    add_middleware(app, config, host, [state.metrics.answered, log_request])
    return app


async def _answer(request: Request, error: Exception) -> Response:
    """Return the answer to an error that a route has raised."""
    if isinstance(error, ClientGoneError):
        return Response(status_code=499)  # nginx's number for this; nobody reads it
    if isinstance(error, HTTPException):
        error = APIError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
    assert isinstance(error, APIError)
    return error_response(error, request.scope)
