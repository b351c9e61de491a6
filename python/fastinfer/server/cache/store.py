"""Interface of the places where answers are kept, and what they count."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(slots=True)
class StoreStats:
    """Counts of a store's work since it was made.

    Attributes:
        errors: calls that the store could not answer.
        evictions: entries that were dropped to make room.
    """

    errors: int = 0
    evictions: int = 0


class Store(Protocol):
    """Keeps values for a limited time. A store that is full, slow or unreachable misses; it raises no error.

    Attributes:
        stats: what the store has done.
    """

    stats: StoreStats

    async def get(self, key: str) -> bytes | None:
        """Return the value of a key, or ``None`` if there is none."""

    async def put(self, key: str, value: bytes) -> None:
        """Keep a value, in place of an older one."""

    async def flush(self, prefix: str) -> int:
        """Drop all entries whose keys begin with a prefix; returns their number.

        Raises:
            ConnectionError: the store did not answer; some of the entries may be left.
        """

    async def close(self) -> None:
        """Release connections; the store is not used afterwards."""
