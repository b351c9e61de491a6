"""Readiness of a server for new requests, and the interface by which signals drain and stop it."""

from enum import Enum
from typing import Protocol


class HostState(Enum):
    """Phase of a server's life, which decides about new requests."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class Host(Protocol):
    """The part that answers requests: an engine, or the replicas behind a router."""

    state: HostState

    def give_up(self) -> None:
        """Wait no longer for what is being loaded."""

    def begin_drain(self) -> None:
        """Refuse new requests from now on; those that run go on."""

    async def stop(self) -> None:
        """End all requests."""
