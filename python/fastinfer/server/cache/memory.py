"""A store in the memory of the process: least recently used entries are dropped first."""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from fastinfer.server.cache.store import StoreStats

# Of Python per entry: the objects of the key, the value and the entry, and the slot of the dictionary. Rounded up.
ENTRY_BYTES = 400


@dataclass(frozen=True, slots=True)
class Entry:
    """A value, and the clock's time from which it is too old."""

    value: bytes
    expiry: float


class MemoryStore:
    """Keeps values up to a total size and an age.

    Args:
        max_bytes: size of all keys and values, with what Python needs for them. A value larger than this is not kept.
        ttl_s: seconds for which a value is found.
        clock: source of the time in seconds.

    Attributes:
        stats: what the store has done.
        num_bytes: size of what is kept.
    """

    def __init__(self, max_bytes: int, ttl_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.stats = StoreStats()
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self._entries: OrderedDict[str, Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    async def get(self, key: str) -> bytes | None:
        entry = self._entries.get(key)
        if entry is not None and entry.expiry <= self._clock():
            self._drop(key)
            entry = None
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry.value

    async def put(self, key: str, value: bytes) -> None:
        self._drop(key)
        size = entry_size(key, value)
        if size > self._max_bytes:
            return
        while self.num_bytes + size > self._max_bytes:
            self._drop(next(iter(self._entries)))
            self.stats.evictions += 1
        self._entries[key] = Entry(value, self._clock() + self._ttl_s)
        self.num_bytes += size

    async def flush(self, prefix: str) -> int:
        keys = [key for key in self._entries if key.startswith(prefix)]
        for key in keys:
            self._drop(key)
        return len(keys)

    async def close(self) -> None:
        self._entries.clear()
        self.num_bytes = 0

    def _drop(self, key: str) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.num_bytes -= entry_size(key, entry.value)


def entry_size(key: str, value: bytes) -> int:
    """Return the bytes for which an entry counts."""
    return len(key) + len(value) + ENTRY_BYTES
