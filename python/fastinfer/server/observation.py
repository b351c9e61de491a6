"""Observation of HTTP requests: one record each, for metrics, logs and traces."""

import time
from collections.abc import Callable, Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fastinfer.server.record import RequestRecord, new_record

_METHODS = frozenset({"GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"})


class Observation:
    """Middleware around everything, which makes the record of a request and passes it on when the request has ended.

    Args:
        app: the application behind.
        observers: functions that take the record of a request that has ended. They must be quick and raise nothing.
    """

    def __init__(self, app: ASGIApp, observers: Sequence[Callable[[RequestRecord], None]]) -> None:
        self._app = app
        self._observers = observers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with new_record() as record:
            await self._observe(record, scope, receive, send)

    async def _observe(self, record: RequestRecord, scope: Scope, receive: Receive, send: Send) -> None:
        begin = time.perf_counter()

        async def watch(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watch)
        finally:
            record.seconds = time.perf_counter() - begin
            # A client must not be able to make names: paths without a route share one.
            record.path = getattr(scope.get("route"), "path", "none")
            record.method = scope["method"] if scope["method"] in _METHODS else "other"
            for observer in self._observers:
                observer(record)
