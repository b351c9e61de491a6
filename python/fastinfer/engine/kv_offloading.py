"""Offloading of the KV cache: blocks move between the cache and the stores in host memory and on disk.

A block goes to the disk as soon as it is full, so that a restarted process finds all that was computed. It goes to host
memory when it is evicted from the prefix cache: host memory then adds to the cache instead of repeating it.

When a sequence is admitted, the blocks that follow its prefix in the cache are looked up in host memory, then on disk,
and loaded into the blocks that it has got. They enter the prefix cache like computed ones.
"""

import torch

from fastinfer.engine.block_store import BlockStore, HostBlockStore
from fastinfer.engine.disk_block_store import DiskBlockStore
from fastinfer.engine.prefix_hash import BlockContent
from fastinfer.engine.transfer import HostCopy
from fastinfer.engine.worker import Worker


class KVOffloading:
    """Copies blocks to the stores and back.

    Blocks to store are only noted until :meth:`save`, which must be called before anything is written into the cache.

    Args:
        workers: workers of the model and of the draft model, if there is one; a stored block has the keys and values
            of both.
        host: store in host memory; ``None`` for none.
        disk: store on disk; ``None`` for none.
        max_blocks_per_step: number of blocks that a step loads at most.

    Attributes:
        host, disk: see above.
        num_loadable: number of blocks that this step may still load.
    """

    def __init__(
        self,
        workers: list[Worker],
        host: HostBlockStore | None,
        disk: DiskBlockStore | None,
        max_blocks_per_step: int,
    ) -> None:
        self.host = host
        self.disk = disk
        self._workers = workers
        self._stores: list[BlockStore] = [store for store in (host, disk) if store is not None]
        self._max_blocks_per_step = max_blocks_per_step
        self.num_loadable = max_blocks_per_step
        self._used: list[tuple[int, BlockContent]] = []
        self._evicted: list[tuple[int, BlockContent]] = []

    def begin_step(self) -> None:
        """Allow as many blocks to be loaded as in any step."""
        self.num_loadable = self._max_blocks_per_step

    def note_use(self, block: int, content: BlockContent) -> None:
        """Note that a sequence has computed a block, or found it in the prefix cache."""
        if self.disk is not None:
            self._used.append((block, content))

    def note_eviction(self, block: int, content: BlockContent) -> None:
        """Note that a block has left the prefix cache and may be overwritten after the next :meth:`save`."""
        if self.host is not None:
            self._evicted.append((block, content))

    def forget(self) -> None:
        """Forget the blocks to store, after an error that may have changed them."""
        self._used.clear()
        self._evicted.clear()

    def save(self) -> None:
        """Store the noted blocks."""
        for store, noted in ((self.disk, self._used), (self.host, self._evicted)):
            if store is not None and noted:
                for block, content in noted:
                    if not store.touch(content):
                        parts = [worker.read_block(block) for worker in self._workers]
                        store.put(content, HostCopy([parts[0] if len(parts) == 1 else torch.cat(parts)]))
                noted.clear()

    def load(self, blocks: list[tuple[int, BlockContent]]) -> int:
        """Load blocks up to the first one that no store has, and return their number.

        Args:
            blocks: consecutive blocks of a sequence, which no other sequence holds, and the contents to load into them;
                at most ``num_loadable``.
        """
        self.save()  # the blocks may hold what is to be stored, and what was evicted may be looked for
        num_loaded = 0
        for block, content in blocks:
            data = next((data for store in self._stores if (data := store.get(content)) is not None), None)
            if data is None:
                break
            parts = data.split([worker.block_bytes for worker in self._workers])
            for worker, part in zip(self._workers, parts, strict=True):
                worker.write_block(block, part)
            num_loaded += 1
        self.num_loadable -= num_loaded
        return num_loaded

    def stats(self) -> dict[str, int]:
        """Return the counters of :class:`fastinfer.engine.stats.EngineStats` that belong to the stores."""
        counters = {}
        if self.host is not None:
            counters["num_loaded_host_blocks"] = self.host.num_loaded
        if self.disk is not None:
            counters["num_loaded_disk_blocks"] = self.disk.num_loaded
            counters["num_damaged_kv_files"] = self.disk.num_damaged
            counters["num_dropped_kv_blocks"] = self.disk.num_dropped
            counters["num_failed_kv_files"] = self.disk.num_failed
        return counters
