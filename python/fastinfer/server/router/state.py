"""State that all routes of a router share."""

from dataclasses import dataclass

from starlette.requests import Request

from fastinfer.server.router.config import RouterConfig
from fastinfer.server.router.host import RouterHost
from fastinfer.server.router.metrics import RouterMetrics


@dataclass(frozen=True, eq=False)
class RouterState:
    """State that all routes share.

    Attributes:
        config: the router's settings.
        host: the replicas.
        metrics: counters and histograms.
    """

    config: RouterConfig
    host: RouterHost
    metrics: RouterMetrics


def router_of(request: Request) -> RouterState:
    """Return the state of the router that handles a request."""
    state: RouterState = request.app.state.server
    return state
