"""Offloading of the KV cache: blocks and snapshots of states move between the cache and the stores beyond it.

A block goes to the disk as soon as it is full, so that a restarted process finds all that was computed. It goes to host
memory when it is evicted from the prefix cache: host memory then adds to the cache instead of repeating it.

When a sequence is admitted, the blocks that follow its prefix in the cache are looked up in host memory, then on disk,
and loaded into the blocks that it has got. They enter the prefix cache like computed ones.

A model whose layers have states has snapshots, too, which are stored like blocks. Blocks are then loaded as far as
there is a snapshot, which returns to the prefix cache.
"""

import torch
from torch import Tensor

from fastinfer.engine.block_store import HostBlockStore
from fastinfer.engine.disk_block_store import DiskBlockStore
from fastinfer.engine.offloaded_cache import OffloadedCache
from fastinfer.engine.prefix_hash import BlockContent
from fastinfer.engine.worker import CachePart, Worker


class KVOffloading:
    """Copies blocks and snapshots of states to the stores and back.

    What is to be stored is only noted until :meth:`save`, which must be called before anything is written into the
    cache.

    Args:
        workers: workers of the model and of the draft model, if there is one; a stored block has the keys and values
            of both.
        host: store in host memory; ``None`` for none.
        disk: store on disk; ``None`` for none.
        max_blocks_per_step: number of blocks that a step loads at most.

    Attributes:
        host, disk: see above.
        blocks, states: what is to be stored of each cache, and what the stores have of it.
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
        self._block_sizes = [worker.part_bytes(CachePart.BLOCK) for worker in workers]
        self._workers = workers
        self.blocks = OffloadedCache(host, disk, sum(self._block_sizes), self._read_block, self._write_block)
        self.states = OffloadedCache(
            host, disk, workers[0].part_bytes(CachePart.STATES), self._read_states, self._write_states, b"states"
        )
        self._max_blocks_per_step = max_blocks_per_step
        self.num_loadable = max_blocks_per_step

    def begin_step(self) -> None:
        """Allow as many blocks to be loaded as in any step."""
        self.num_loadable = self._max_blocks_per_step

    def forget(self) -> None:
        """Forget what is to be stored, after an error at an arbitrary point that may have changed it."""
        self.blocks.forget()
        self.states.forget()
        if self.host is not None:
            self.host.recount()

    def save(self) -> None:
        """Store what was noted."""
        self.blocks.save()
        self.states.save()

    def load(self, blocks: list[tuple[int, BlockContent, int | None]]) -> int:
        """Load blocks up to the first one that is nowhere, and return their number.

        Args:
            blocks: consecutive blocks of a sequence, which no other sequence holds, with the contents to load into
                them, and the blocks of the prefix cache that have these contents; at most ``num_loadable``.
        """
        self.save()  # the blocks may hold what is to be stored, and what was evicted may be looked for
        num_loaded = 0
        for block, content, source in blocks:
            data = self.blocks.find(content) if source is None else self._read_block(source)
            if data is None:
                break
            self._write_block(block, data)
            num_loaded += 1
        self.num_loadable -= num_loaded
        return num_loaded

    def restore_snapshot(self, data: Tensor, slot: int) -> None:
        """Write a snapshot from a store to a slot, which may hold what is to be stored before."""
        self.save()
        self.states.write(slot, data)

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

    def _read_block(self, block: int) -> Tensor:
        parts = [worker.read_part(CachePart.BLOCK, block) for worker in self._workers]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _write_block(self, block: int, data: Tensor) -> None:
        for worker, part in zip(self._workers, data.split(self._block_sizes), strict=True):
            worker.write_part(CachePart.BLOCK, block, part)

    def _read_states(self, slot: int) -> Tensor:
        return self._workers[0].read_part(CachePart.STATES, slot)

    def _write_states(self, slot: int, data: Tensor) -> None:
        self._workers[0].write_part(CachePart.STATES, slot, data)
