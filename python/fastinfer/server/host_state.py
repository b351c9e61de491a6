"""What a server does with new requests, and what its signals do to it."""

from enum import Enum
from typing import Protocol


class HostState(Enum):
    """What the server does with new requests."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class Host(Protocol):
    """What answers the requests: an engine, or the replicas behind a router."""

    state: HostState

    def give_up(self) -> None:
        """Wait no longer for what is being loaded."""

    def begin_drain(self) -> None:
        """Refuse new requests from now on; those that run go on."""

    async def stop(self) -> None:
        """End all requests."""
