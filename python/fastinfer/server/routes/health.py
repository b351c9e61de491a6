"""Probes and statistics: ``/health``, ``/ready``, ``/metrics``, ``/load``, ``/version``."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

import fastinfer
from fastinfer.server.errors import JSON, RETRY_FULL_S
from fastinfer.server.state import server_of

router = APIRouter()


@router.head("/health", include_in_schema=False)  # as monitors ask
@router.get("/health")
@router.get("/ping")
async def health(request: Request) -> Response:
    """Say whether the process works: 503 means that only a restart helps. While the model is loading it works."""
    host = server_of(request).host
    if (illness := host.illness()) is not None:
        return JSON({"status": "error", "reason": illness}, 503)
    return JSON({"status": "ok", "state": host.state.value})


@router.head("/ready", include_in_schema=False)
@router.get("/ready")
async def ready(request: Request) -> Response:
    """Say whether requests are welcome: the model is loaded, and the server is not draining, stalled or full."""
    reason = server_of(request).host.unreadiness()
    if reason is not None:
        return JSON({"status": "unavailable", "reason": reason}, 503, {"Retry-After": str(RETRY_FULL_S)})
    return JSON({"status": "ok"})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Return all metrics in Prometheus' format."""
    return Response(server_of(request).metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/load")
async def load(request: Request) -> Response:
    """Return the number of requests in the engine, for load balancers."""
    engine = server_of(request).host.loaded
    if engine is None:
        return JSON({"server_load": 0, "num_running": 0, "num_waiting": 0, "num_waiting_tokens": 0})
    stats = engine.stats()
    return JSON(
        {
            "server_load": stats.num_running + stats.num_waiting,
            "num_running": stats.num_running,
            "num_waiting": stats.num_waiting,
            "num_waiting_tokens": stats.num_waiting_tokens,
        }
    )


@router.get("/version")
async def version() -> Response:
    """Return the library's version."""
    return JSON({"version": fastinfer.__version__})
