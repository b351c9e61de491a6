"""A server behind the router: its state, its load, and the prefixes that it has computed."""

import asyncio
import contextlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Protocol

from fastinfer.client.endpoint import Headers
from fastinfer.server.router.prefix_index import PrefixIndex
from fastinfer.server.router.prompts import NO_PROMPT, Prompt

NOT_ASKED = "not asked yet"
# A request counts as one, and as one more for each so many bytes of prompt that have to be computed.
LOAD_BYTES = 4096

_numbers = itertools.count(1)


class Answer(Protocol):
    """An answer that has begun, and is read piece by piece.

    Attributes:
        status: its status.
        headers: its headers, with names in lower case.
    """

    @property
    def status(self) -> int: ...

    @property
    def headers(self) -> list[tuple[bytes, bytes]]: ...

    async def read(self) -> bytes:
        """Return the next piece of the body; empty at its end.

        Raises:
            ServerError: the server is lost before the answer ends.
        """


class Replica(ABC):
    """A server behind the router.

    Args:
        name: its name for logs and metrics.
        max_index_blocks: size of the index of its prefixes.

    Attributes:
        is_ready: whether it gets new requests.
        is_reachable: whether it has answered when it was last asked; one that sleeps does, and is not ready.
        reason: why not; empty if it does.
        load: requests that the router has there, weighed by the prompts that have to be computed.
        num_running: their number.
        last_chosen: number that grows with each choice of any replica.
        prefixes: prefixes that it has computed.
        wake_probe: set when its state is in doubt.
        was_probed: set when it has been asked since then.
    """

    def __init__(self, name: str, max_index_blocks: int) -> None:
        self.name = name
        self.is_ready = self.is_reachable = False
        self.reason = NOT_ASKED
        self.load = 0.0
        self.num_running = 0
        self.last_chosen = 0
        self.prefixes = PrefixIndex(max_index_blocks)
        self.wake_probe = asyncio.Event()
        self.was_probed = asyncio.Event()

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
        self.is_ready, self.is_reachable, self.reason = True, True, ""

    def set_unready(self, reason: str, *, is_reachable: bool = True) -> None:
        """Give it no new requests until it says that it is ready."""
        self.is_ready, self.is_reachable, self.reason = False, is_reachable, reason

    def lose(self, reason: str) -> None:
        """Take note that a connection has failed: it may have died, and then its cache is empty."""
        self.set_unready(reason, is_reachable=False)
        self.prefixes.clear()
        self.wake_probe.set()

    @abstractmethod
    def ask(
        self, method: str, path: str, headers: Headers, body: bytes, prompt: Prompt = NO_PROMPT
    ) -> contextlib.AbstractAsyncContextManager[Answer]:
        """Send a request, and give the answer once it has begun; the request is given up if it is not read to its end.

        Args:
            method, path, headers, body: the request.
            prompt: its prompt, for a replica that stands for several.

        Raises:
            ServerError: the server is lost, and does not answer.
        """

    @abstractmethod
    def close(self) -> None:
        """Give up what runs there."""
