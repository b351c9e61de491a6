"""Block managers with one group of layers, and the blocks that a sequence has there."""

from fastinfer.engine.block_manager import BlockManager
from fastinfer.engine.block_pool import BlockPool
from fastinfer.engine.sequence import Sequence


def block_manager(num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> BlockManager:
    return BlockManager([BlockPool(num_blocks)], block_size, enable_prefix_caching)


def blocks_of(sequence: Sequence) -> list[int]:
    return sequence.block_tables[0].blocks if sequence.block_tables else []
