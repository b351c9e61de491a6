"""Stores of computed blocks beyond the KV cache: their interface, and the one in host memory."""

from abc import ABC, abstractmethod
from collections import OrderedDict

from torch import Tensor

from fastinfer.engine.prefix_hash import BlockContent
from fastinfer.engine.transfer import HostCopy


class BlockStore(ABC):
    """Keeps the keys and values of full blocks, and snapshots of states, by the tokens that they stand for.

    Both are called blocks here. A store may lose any block at any time. What :meth:`get` returns is what was put under
    the same content.

    Attributes:
        num_loaded: number of blocks that :meth:`get` found since the start.
    """

    def __init__(self) -> None:
        self.num_loaded = 0

    @abstractmethod
    def touch(self, content: BlockContent) -> bool:
        """Return whether the block is stored, and if so, mark it as used just now."""

    @abstractmethod
    def put(self, content: BlockContent, data: HostCopy) -> None:
        """Store a block.

        Args:
            content: identity of the block.
            data: copy of its bytes, one tensor of [num_bytes] uint8, which may still be on its way.
        """

    @abstractmethod
    def get(self, content: BlockContent, num_bytes: int) -> Tensor | None:
        """Return a block's bytes, [num_bytes] uint8 in host memory, or ``None`` if it is not stored.

        They may be overwritten by the next call.
        """


class HostBlockStore(BlockStore):
    """Blocks in host memory; the least recently used ones make room for new ones.

    Args:
        max_bytes: size of the store in bytes, at least that of a block.

    Attributes:
        max_bytes: see above.
        num_bytes: size of all blocks in bytes.
    """

    def __init__(self, max_bytes: int) -> None:
        super().__init__()
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._blocks: OrderedDict[BlockContent, HostCopy] = OrderedDict()  # the least recently used one comes first

    def __len__(self) -> int:
        return len(self._blocks)

    def clear(self) -> None:
        """Forget all blocks."""
        self._blocks.clear()
        self.num_bytes = 0

    def recount(self) -> None:
        """Count the bytes again, after an error at an arbitrary point."""
        self.num_bytes = sum(data.num_bytes for data in self._blocks.values())

    def touch(self, content: BlockContent) -> bool:
        if content not in self._blocks:
            return False
        self._blocks.move_to_end(content)
        return True

    def put(self, content: BlockContent, data: HostCopy) -> None:
        self.num_bytes += data.num_bytes
        while self.num_bytes > self.max_bytes:
            _, oldest = self._blocks.popitem(last=False)
            self.num_bytes -= oldest.num_bytes
        self._blocks[content] = data

    def get(self, content: BlockContent, num_bytes: int) -> Tensor | None:
        if not self.touch(content):
            return None
        self.num_loaded += 1
        [data] = self._blocks[content].wait()
        return data
