"""uvicorn's HTTP parser with a bound on heads: httptools collects a header of any length."""

from asyncio import Transport
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

# A head of this size is refused while it is read; smaller ones above the server's limit get an answer that says why.
MAX_HEAD_BYTES = 256 << 10
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class BoundedHttpProtocol(HttpToolsProtocol):
    """Closes connections whose heads do not end. ``scope["abort"]`` closes the connection at once."""

    def connection_made(self, transport: Transport) -> None:
        self._num_head_bytes, self._is_in_head = 0, True
        super().connection_made(transport)

    def on_message_begin(self) -> None:
        self._num_head_bytes, self._is_in_head = 0, True
        super().on_message_begin()
        scope: Any = self.scope
        scope["abort"] = self.transport.abort

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        # uvicorn leaves the timer of a connection that was reset, and with it the connection and its last request.
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_in_head and not self.transport.is_closing():
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self.transport.write(_TOO_LARGE)
                self.transport.close()
