"""Transfer between one cache and the stores beyond it: blocks of keys and values, or snapshots of states."""

import hashlib
from collections.abc import Callable

from torch import Tensor

from fastinfer.engine.block_store import BlockStore
from fastinfer.engine.prefix_hash import BlockContent
from fastinfer.engine.transfer import HostCopy


class OffloadedCache:
    """Copies entries of a cache to the stores and back.

    Entries to store are only noted until :meth:`save`, which must be called before anything is written into the cache.

    Args:
        host: store in host memory for entries that are evicted; ``None`` for none.
        disk: store on disk for entries that are used; ``None`` for none.
        num_bytes: size of an entry.
        read: function from the number of an entry to a copy of its bytes, [num_bytes] uint8.
        write: function that fills an entry, given its number and its bytes in host memory.
        kind: name of what the cache has, by which its entries in the stores differ from those of other caches.
    """

    def __init__(
        self,
        host: BlockStore | None,
        disk: BlockStore | None,
        num_bytes: int,
        read: Callable[[int], Tensor],
        write: Callable[[int, Tensor], None],
        kind: bytes = b"",
    ) -> None:
        self.write = write
        self._host = host
        self._disk = disk
        self._stores = [store for store in (host, disk) if store is not None]
        self._num_bytes = num_bytes
        self._read = read
        self._kind = kind
        self._used: list[tuple[int, BlockContent]] = []
        self._evicted: list[tuple[int, BlockContent]] = []

    def note_use(self, entry: int, content: BlockContent) -> None:
        """Note that a sequence has computed an entry, or found it in the prefix cache."""
        if self._disk is not None:
            self._used.append((entry, content))

    def note_eviction(self, entry: int, content: BlockContent) -> None:
        """Note that an entry has left the prefix cache and may be overwritten after the next :meth:`save`."""
        if self._host is not None:
            self._evicted.append((entry, content))

    def forget(self) -> None:
        """Forget the entries to store, after an error that may have changed them."""
        self._used.clear()
        self._evicted.clear()

    def save(self) -> None:
        """Store the noted entries."""
        for store, noted in ((self._disk, self._used), (self._host, self._evicted)):
            if store is not None and noted:
                for entry, content in noted:
                    stored = self._stored(content)
                    if not store.touch(stored):
                        store.put(stored, HostCopy([self._read(entry)]))
                noted.clear()

    def contains(self, content: BlockContent) -> bool:
        """Return whether a store has an entry, which is then marked as used just now."""
        stored = self._stored(content)
        return any(store.touch(stored) for store in self._stores)

    def find(self, content: BlockContent) -> Tensor | None:
        """Return an entry's bytes, [num_bytes] uint8 in host memory, or ``None`` if no store has it.

        They may be overwritten by the next call.
        """
        stored, size = self._stored(content), self._num_bytes
        return next((data for store in self._stores if (data := store.get(stored, size)) is not None), None)

    def _stored(self, content: BlockContent) -> BlockContent:
        """Return the content under which the stores have an entry."""
        if not self._kind:
            return content
        return BlockContent(hashlib.sha256(self._kind + content.key).digest(), content.tokens)
