"""A server behind the router: its state, its load, and the connections to it."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Iterator

from fastinfer.client.endpoint import Endpoint, Headers
from fastinfer.errors import ServerError
from fastinfer.server.router.prefix_index import PrefixIndex
from fastinfer.server.router.prompts import Prompt
from fastinfer.server.router.replica_connection import ReplicaConnection

# Servers close idle connections; fastinfer's after 75 s.
MAX_IDLE_S = 60.0
MAX_IDLE = 256  # kept for further requests
# A request counts as one, and as one more for each so many bytes of prompt that have to be computed.
LOAD_BYTES = 4096

_numbers = itertools.count(1)


class Replica:
    """A server behind the router.

    Args:
        endpoint: its address.
        max_index_blocks: size of the index of its prefixes.
        name: its name for logs and metrics; by default its address.

    Attributes:
        is_ready: whether it gets new requests.
        reason: why not; empty if it does.
        load: requests that the router has there, weighed by the prompts that have to be computed.
        num_running: their number.
        last_chosen: number that grows with each choice of any replica.
        prefixes: prefixes that it has computed.
        wake_probe: set when its state is in doubt.
    """

    def __init__(self, endpoint: Endpoint, max_index_blocks: int, name: str | None = None) -> None:
        self.endpoint = endpoint
        self.name = name or endpoint.authority + endpoint.base_path
        self.is_ready = False
        self.reason = "not asked yet"
        self.load = 0.0
        self.num_running = 0
        self.last_chosen = 0
        self.prefixes = PrefixIndex(max_index_blocks)
        self.wake_probe = asyncio.Event()
        self._idle: list[tuple[float, ReplicaConnection]] = []
        self._in_use: set[ReplicaConnection] = set()

    @contextlib.contextmanager
    def running(self, prompt: Prompt) -> Iterator[int]:
        """Count a request while it runs, and remember its prompt; gives the number of bytes that were known."""
        matched = self.prefixes.matched(prompt)
        cost = 1 + max(prompt.num_bytes - matched, 0) / LOAD_BYTES
        self.load += cost
        self.num_running += 1
        self.last_chosen = next(_numbers)
        self.prefixes.add(prompt)
        try:
            yield matched
        finally:
            self.num_running -= 1
            # Not a sum of rounding errors for ever.
            self.load = self.load - cost if self.num_running else 0.0

    def set_ready(self) -> None:
        """Let it have new requests."""
        self.is_ready, self.reason = True, ""

    def set_unready(self, reason: str) -> None:
        """Give it no new requests until it says that it is ready."""
        self.is_ready, self.reason = False, reason

    def lose(self, reason: str) -> None:
        """Take note that a connection has failed: it may have died, and then its cache is empty."""
        self.set_unready(reason)
        self.prefixes.clear()
        self.wake_probe.set()

    @contextlib.asynccontextmanager
    async def ask(self, method: str, path: str, headers: Headers, body: bytes) -> AsyncIterator[ReplicaConnection]:
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
