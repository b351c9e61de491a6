"""Counts of HTTP requests."""

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fastinfer.server.metrics import Metrics

_METHODS = frozenset({"GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"})


class HttpMetrics:
    """Middleware that counts requests by route and status; paths without a route share one name.

    Args:
        app: the application behind.
        metrics: the server's metrics.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin, status = time.perf_counter(), 499

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watch)
        finally:
            # A client must not be able to make names.
            route = getattr(scope.get("route"), "path", "none")
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self._metrics.http_requests.labels(method, route, str(status)).inc()
            self._metrics.http_duration.labels(route).observe(time.perf_counter() - begin)
