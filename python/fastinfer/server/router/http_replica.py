"""A server that the router reaches over HTTP, and the connections to it."""

import contextlib
import time
from collections.abc import AsyncIterator

from fastinfer.client.endpoint import Endpoint, Headers
from fastinfer.errors import ServerError
from fastinfer.server.router.prompts import NO_PROMPT, Prompt
from fastinfer.server.router.replica import Replica
from fastinfer.server.router.replica_connection import ReplicaConnection

# Servers close idle connections; fastinfer's after 75 s.
MAX_IDLE_S = 60.0
MAX_IDLE = 256  # kept for further requests


class HttpReplica(Replica):
    """A server that the router reaches over HTTP.

    Args:
        endpoint: its address.
        max_index_blocks: size of the index of its prefixes.
        name: its name for logs and metrics; by default its address.
    """

    def __init__(self, endpoint: Endpoint, max_index_blocks: int, name: str | None = None) -> None:
        super().__init__(name or endpoint.authority + endpoint.base_path, max_index_blocks)
        self.endpoint = endpoint
        self._idle: list[tuple[float, ReplicaConnection]] = []
        self._in_use: set[ReplicaConnection] = set()

    @contextlib.asynccontextmanager
    async def ask(
        self, method: str, path: str, headers: Headers, body: bytes, prompt: Prompt = NO_PROMPT
    ) -> AsyncIterator[ReplicaConnection]:
        """Send a request, and give the connection once the answer has begun; it is closed if the answer is not read.

        Raises:
            ServerError: there is no connection, or no answer.
        """
        connection = await self._send(method, path, headers, body)
        try:
            yield connection
        finally:
            self._release(connection)

    def close(self) -> None:
        """Close all connections; what runs on them fails."""
        for connection in [*self._in_use, *(connection for _, connection in self._idle)]:
            connection.close()
        self._idle.clear()

    def _idle_connection(self) -> ReplicaConnection | None:
        """Return an open connection, the one that was used last; ``None`` if there is none."""
        while self._idle:
            since, connection = self._idle.pop()
            if connection.is_idle and time.monotonic() - since < MAX_IDLE_S:
                return connection
            connection.close()
        return None

    async def _send(self, method: str, path: str, headers: Headers, body: bytes) -> ReplicaConnection:
        idle = self._idle_connection()
        if idle is not None:
            with contextlib.suppress(ServerError):  # the replica may be closing it
                return await self._send_on(idle, method, path, headers, body)
        return await self._send_on(await ReplicaConnection.open(self.endpoint), method, path, headers, body)

    async def _send_on(
        self, connection: ReplicaConnection, method: str, path: str, headers: Headers, body: bytes
    ) -> ReplicaConnection:
        self._in_use.add(connection)
        try:
            await connection.send(method, path, headers, body)
        except BaseException:
            self._release(connection)
            raise
        return connection

    def _release(self, connection: ReplicaConnection) -> None:
        """Keep a connection for the next request, or close it if there is more to come on it."""
        self._in_use.discard(connection)
        if connection.is_idle and len(self._idle) < MAX_IDLE:
            self._idle.append((time.monotonic(), connection))
        else:
            connection.close()
