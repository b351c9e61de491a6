"""Limits on heads and bodies, request ids, and the last resort for errors."""

import asyncio
import re
import secrets
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fastinfer.server.errors import APIError, as_api_error, error_response
from fastinfer.server.record import record

_REQUEST_ID = re.compile(rb"[!-~]{1,128}")


class Limits:
    """Middleware around everything: bounds what a client sends, and gives each answer an id and a status.

    A valid ``X-Request-Id`` of the client is kept; other requests get a random one. The id is in the answer's header
    and in the record of the request, as is what the response cache did.

    Args:
        app: the application behind.
        max_body_bytes, max_header_bytes: largest body and head.
        is_closing: function that says whether the server is shutting down; answers then close their connections.
    """

    def __init__(
        self, app: ASGIApp, max_body_bytes: int, max_header_bytes: int, is_closing: Callable[[], bool]
    ) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._max_header_bytes = max_header_bytes
        self._is_closing = is_closing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_begun = False
        request_id, length, header_bytes = b"", None, len(scope.get("query_string", b""))
        for name, value in scope["headers"]:
            header_bytes += len(name) + len(value)
            if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
                request_id = value
            elif name == b"traceparent":
                record().traceparent = value.decode("latin-1")
            elif name == b"content-length":
                length = value
        request_id = request_id or secrets.token_hex(16).encode()
        record().request_id = request_id.decode()

        async def send_with_id(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                headers = [*message["headers"], (b"x-request-id", request_id)]
                if (cache := record().cache) is not None:
                    headers.append((b"x-cache", cache.encode()))
                if self._is_closing():
                    headers.append((b"connection", b"close"))
                message = {**message, "headers": headers}
            await send(message)

        try:
            if header_bytes > self._max_header_bytes:
                raise APIError(431, f"the head must have at most {self._max_header_bytes} bytes, got {header_bytes}")
            if length is not None and (not length.isdigit() or int(length) > self._max_body_bytes):
                raise self._too_large()
            await self._app(scope, receive if length is not None else self._counting(receive), send_with_id)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            answer = as_api_error(error)
            if has_begun:  # too late for a status; the connection is closed
                raise
            await error_response(answer, scope)(scope, receive, send_with_id)

    def _counting(self, receive: Receive) -> Receive:
        """Bound a body that does not announce its length."""
        num_bytes = 0

        async def bounded() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_body_bytes:
                raise self._too_large()
            return message

        return bounded

    def _too_large(self) -> APIError:
        return APIError(413, f"the body must have at most {self._max_body_bytes} bytes", code="body_too_large")
