"""A connection to a replica, whose answer is read piece by piece."""

import asyncio

from fastinfer.client.connection import Connection
from fastinfer.client.endpoint import Endpoint, Headers
from fastinfer.errors import ServerError

# What is kept of an answer that the client does not take; the replica then has to wait.
MAX_BUFFER_BYTES = 256 << 10


class ReplicaConnection(Connection):
    """A connection for one request after another.

    Attributes:
        headers: headers of the answer, with names in lower case.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__(endpoint)
        self.headers: list[tuple[bytes, bytes]] = []
        self._pieces: list[bytes] = []
        self._num_bytes = 0
        self._is_paused = False
        self._answer: asyncio.Future[int] | None = None
        self._news = asyncio.Event()

    async def send(self, method: str, path: str, headers: Headers, body: bytes) -> int:
        """Send a request and return the status once the answer has begun.

        Raises:
            ServerError: the connection ends before that.
        """
        self._has_head = False
        self._pieces.clear()
        self._answer = asyncio.ensure_future(self.request(method, path, body, self._take, headers))
        self._answer.add_done_callback(self._on_end)
        while not self._has_head:
            if self._answer.done():
                self._answer.result()
                raise ServerError(f"{self._endpoint.authority}: the answer has no head")
            await self._wait()
        return self.status

    async def read(self) -> bytes:
        """Return the next piece of the body; empty at its end.

        Raises:
            ServerError: the connection ends before the answer does.
        """
        assert self._answer is not None, "read() comes after send()"
        while not self._pieces:
            if self._answer.done():
                self._answer.result()
                return b""
            await self._wait()
        data = b"".join(self._pieces)
        self._pieces.clear()
        self._num_bytes = 0
        if self._is_paused and self._transport is not None and self.is_open:
            self._is_paused = False
            self._transport.resume_reading()
        return data

    @property
    def is_idle(self) -> bool:
        """Whether the answer has been read to its end, and another request can be sent."""
        return self.is_open and not self._pieces and self._answer is not None and self._answer.done()

    def _take(self, data: bytes) -> None:
        self._pieces.append(data)
        self._num_bytes += len(data)
        if self._num_bytes > MAX_BUFFER_BYTES and not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()
        self._news.set()

    def _on_end(self, answer: "asyncio.Future[int]") -> None:
        if not answer.cancelled():
            answer.exception()  # which is raised where the answer is read
        self._news.set()

    async def _wait(self) -> None:
        self._news.clear()
        await self._news.wait()

    # Called by the parser.

    def on_message_begin(self) -> None:
        self.headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._ends_with_connection = False  # a replica that dies must not look as if it had finished
        if self._has_head:
            self._news.set()
