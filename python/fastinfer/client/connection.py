"""HTTP/1.1 connection that passes bodies to a callback, without a task switch per piece.

General HTTP clients wake a task for every piece of a body. The load generator of ``fastinfer bench serve`` shares the
machine with the server that it measures, so all that happens here per read is one call of a C parser and one callback.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import TypeVar, cast

import httptools

from fastinfer.client.endpoint import JSON_HEADERS, Endpoint, Headers
from fastinfer.errors import ServerError

CONNECT_TIMEOUT_S = 10.0

AnyConnection = TypeVar("AnyConnection", bound="Connection")


class Connection(asyncio.Protocol):
    """A connection for one request after another; :meth:`open` makes it."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._parts: list[bytes] = []
        self._on_data: Callable[[bytes], None] | None = None
        self._status: asyncio.Future[int] | None = None
        self._has_head = False  # of the answer that arrives
        self._ends_with_connection = True  # unless its head says how long it is
        self._failure = ""  # why the connection is closed

    @classmethod
    async def open(cls: type[AnyConnection], endpoint: Endpoint) -> AnyConnection:
        """Connect.

        Raises:
            ServerError: the server cannot be reached, or has no valid certificate.
        """
        loop = asyncio.get_running_loop()
        connecting = loop.create_connection(
            lambda: cls(endpoint), endpoint.host, endpoint.port, ssl=endpoint.ssl_context
        )
        try:
            _, connection = await asyncio.wait_for(connecting, CONNECT_TIMEOUT_S)
        except asyncio.TimeoutError:
            raise ServerError(f"{endpoint.authority}: no connection within {CONNECT_TIMEOUT_S:g} s") from None
        except OSError as error:
            raise ServerError(f"{endpoint.authority}: {error.strerror or error}") from None
        return connection

    @property
    def is_open(self) -> bool:
        """Whether another request can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    @property
    def status(self) -> int:
        """Status of the answer whose body the callback gets."""
        return int(self._parser.get_status_code())

    async def request(
        self, method: str, path: str, body: bytes, on_data: Callable[[bytes], None], headers: Headers = JSON_HEADERS
    ) -> int:
        """Send a request, and return the status once the answer is complete.

        Args:
            method, path: the request line; the endpoint's base path is added.
            body: JSON, unless the headers say otherwise; empty for none.
            on_data: function that gets what each read of the socket brings of the answer's body.
            headers: headers beside those that the endpoint adds.

        Raises:
            ServerError: the connection ends before the answer does, or the answer is not HTTP.
        """
        if self._transport is None or not self.is_open:
            raise ServerError(self._failure or f"{self._endpoint.authority}: the connection is closed")
        self._on_data = on_data
        self._has_head, self._ends_with_connection = False, True
        self._status = asyncio.get_running_loop().create_future()
        self._transport.write(self._endpoint.request_head(method, path, len(body), headers) + body)
        return await self._status

    def close(self) -> None:
        """Close the connection at once, which also tells the server to give up the request."""
        if self._transport is not None:
            self._transport.abort()

    # Called by asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"expected an answer in HTTP, got something else ({error})")
            self.close()
            return
        if self._parts and self._on_data is not None:
            self._on_data(self._parts[0] if len(self._parts) == 1 else b"".join(self._parts))
            self._parts.clear()

    def eof_received(self) -> None:
        if self._has_head and self._ends_with_connection:  # RFC 9112, section 6.3
            self._finish()

    def connection_lost(self, error: Exception | None) -> None:
        self._fail("the connection ended before the answer did")

    def _fail(self, message: str) -> None:
        self._failure = self._failure or f"{self._endpoint.authority}: {message}"
        if self._status is not None and not self._status.done():
            self._status.set_exception(ServerError(self._failure))

    def _finish(self) -> None:
        with contextlib.suppress(asyncio.InvalidStateError):  # the request was cancelled
            if self._status is not None:
                self._status.set_result(self.status)

    # Called by the parser.

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._ends_with_connection = False

    def on_headers_complete(self) -> None:
        self._has_head = self.status >= 200
        if not self._has_head:  # another answer follows
            self._ends_with_connection = True

    def on_body(self, data: bytes) -> None:
        self._parts.append(data)

    def on_message_complete(self) -> None:
        if not self._has_head:
            return
        self._finish()
        if not self._parser.should_keep_alive():
            self.close()
