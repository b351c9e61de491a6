"""uvicorn's HTTP protocol with bounds on heads and on waiting, and without upgrades to other protocols."""

from asyncio import TimerHandle, Transport
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

# A head of this size is refused while it is read; smaller ones above the server's limit get an answer that says why.
MAX_HEAD_BYTES = 256 << 10
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class BoundedHttpProtocol(HttpToolsProtocol):
    """Closes connections whose heads do not end, and those on which nothing goes on.

    ``Upgrade`` is ignored, as RFC 9110 (7.8) allows: Java's client asks for HTTP/2 with each of its requests. httptools
    itself would take the body of such a request for another protocol, and the next packet for another request.

    ``scope["abort"]`` closes the connection at once.

    Args:
        head_timeout_s: seconds in which a head must have arrived once it has begun.
        write_timeout_s: seconds after which a client that takes nothing more of its answer is cut off.
        options: options of uvicorn's protocol.
    """

    parser: Any

    def __init__(self, *, head_timeout_s: float, write_timeout_s: float, **options: Any) -> None:
        super().__init__(**options)
        self._head_timeout_s = head_timeout_s
        self._write_timeout_s = write_timeout_s
        self._num_head_bytes, self._is_in_head = 0, True
        self._head_timer: TimerHandle | None = None
        self._write_timer: TimerHandle | None = None
        self._num_unsent = 0  # bytes in the transport's buffer when the write timer was started

    def connection_made(self, transport: Transport) -> None:
        super().connection_made(transport)
        # As between two requests: clients open connections before they need them.
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        # A timer would keep the connection, and uvicorn leaves its own one if the connection was reset.
        for timer in (self.timeout_keep_alive_task, self._head_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self._feed(memoryview(data))
        except httptools.HttpParserError:
            message = "Invalid HTTP request received."
            self.logger.warning(message)
            self.send_400_response(message)
        if self._is_in_head and not self.transport.is_closing():
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self.transport.write(_TOO_LARGE)
                self.transport.close()
        if self.transport.is_closing():
            self._watch_writing()
        elif self._head_timer is None and (self._is_in_head or not self._is_answering):
            self._head_timer = self.loop.call_later(self._head_timeout_s, self._end_head)

    def _feed(self, data: memoryview) -> None:
        """Parse bytes; a head with an upgrade is parsed again without it."""
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                if self.parser.get_method() == b"CONNECT":  # what follows is no HTTP at all
                    raise httptools.HttpParserError("CONNECT is not supported") from None
                head, data = self._head_without_upgrade(), data[upgrade.args[0] :]
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own parser
            self.parser.feed_data(head)

    def _head_without_upgrade(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [self.parser.get_method() + b" " + self.url + b" HTTP/" + version]
        lines += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def on_message_begin(self) -> None:
        self._num_head_bytes, self._is_in_head = 0, True
        super().on_message_begin()
        scope: Any = self.scope
        scope["abort"] = self.transport.abort

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._is_in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_writing()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._watch_writing()

    @property
    def _is_answering(self) -> bool:
        """Whether a request has not got its whole answer."""
        return self.cycle is not None and not self.cycle.response_complete

    def _end_head(self) -> None:
        """Close the connection if no request has begun in time; behind one that runs, another one may wait."""
        self._head_timer = None
        if self._is_answering:
            self._head_timer = self.loop.call_later(self._head_timeout_s, self._end_head)
        else:
            self.transport.close()
            self._watch_writing()

    def _watch_writing(self) -> None:
        """Start the write timer anew if the buffer can only become smaller: it is full, or no answer is written."""
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        self._num_unsent = self.transport.get_write_buffer_size()
        if self._num_unsent and (self.flow.write_paused or not self._is_answering):
            self._write_timer = self.loop.call_later(self._write_timeout_s, self._end_writing)

    def _end_writing(self) -> None:
        """Cut off a client that has taken nothing."""
        before = self._num_unsent
        self._watch_writing()
        if self._write_timer is not None and self._num_unsent >= before:
            self.transport.abort()
