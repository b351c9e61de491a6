"""The paged KV cache: its tensors, who owns which block, and how large it should be.

Paging: Kwon et al., 2023, https://arxiv.org/abs/2309.06180.
"""

import os
from dataclasses import dataclass

import torch
from torch import Tensor

from fastinfer.engine.sequence import Sequence

# Of the memory that is available when the cache is sized without being told.
MEMORY_SHARE = 0.25
# Few requests fill a long context; beyond this many tokens each, preemption is cheaper than the memory.
TYPICAL_TOKENS = 2048


@dataclass(frozen=True)
class KVCacheTensors:
    """Keys and values: per layer one tensor [num_blocks, block_size, num_kv_heads, head_dim] each."""

    k: list[Tensor]
    v: list[Tensor]

    @classmethod
    def empty(
        cls,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: str,
    ) -> "KVCacheTensors":
        """Uninitialised tensors: on a CPU a page costs memory only once it is written."""
        shape = (num_blocks, block_size, num_kv_heads, head_dim)
        k, v = ([torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)] for _ in "kv")
        return cls(k, v)


class KVCache:
    """Hands out the cache's blocks to sequences; a block is free when nobody refers to it."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        # A stack, with block 0 on top: blocks that were in use are used again before untouched memory.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._ref_counts = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return sum(count > 0 for count in self._ref_counts)

    def can_allocate(self, sequence: Sequence, spare: int = 0) -> bool:
        """Whether all tokens of a waiting sequence fit and ``spare`` blocks stay free."""
        return self._num_missing(sequence) + spare <= len(self._free)

    def allocate(self, sequence: Sequence) -> None:
        """Give a waiting sequence blocks for all its tokens."""
        self._grow(sequence)

    def can_append(self, sequence: Sequence) -> bool:
        """Whether the newest token of a running sequence has a slot, or can get one."""
        return self._num_missing(sequence) <= len(self._free)

    def append(self, sequence: Sequence) -> None:
        """Give a running sequence the block that its newest token needs, if it needs one."""
        self._grow(sequence)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let a waiting child share the computed blocks of a parent whose tokens it starts with.

        Only full blocks are shared, as nothing is written into these again: copy-on-write is never needed. The child
        computes at least its last token itself, whose logits it wants.
        """
        num_shared = min(parent.num_computed_tokens, len(child) - 1) // self.block_size
        child.blocks = parent.blocks[:num_shared]
        child.num_computed_tokens = num_shared * self.block_size
        for block in child.blocks:
            self._ref_counts[block] += 1

    def free(self, sequence: Sequence) -> None:
        """Take back all blocks; those that nobody else refers to become free."""
        for block in reversed(sequence.blocks):
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._free.append(block)
        sequence.blocks = []

    def _num_missing(self, sequence: Sequence) -> int:
        return num_blocks_for(len(sequence), self.block_size) - len(sequence.blocks)

    def _grow(self, sequence: Sequence) -> None:
        for _ in range(self._num_missing(sequence)):
            block = self._free.pop()
            self._ref_counts[block] = 1
            sequence.blocks.append(block)


def available_memory(device: str) -> int:
    """Bytes that can be allocated on the device without pushing anything out."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as file:
            line = next(line for line in file if line.startswith("MemAvailable:"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def default_num_blocks(
    block_size: int, block_bytes: int, max_model_len: int, max_num_seqs: int, available_bytes: int
) -> int:
    """Blocks for ``max_num_seqs`` sequences of usual length, as far as a share of the memory allows.

    Args:
        block_size: tokens per block.
        block_bytes: size of a block over all layers, keys and values.
        max_model_len: longest sequence, in tokens.
        max_num_seqs: sequences that run at the same time.
        available_bytes: from :func:`available_memory`; ``MEMORY_SHARE`` of it may be used.
    """
    usual = max_num_seqs * num_blocks_for(min(max_model_len, TYPICAL_TOKENS), block_size)
    affordable = int(available_bytes * MEMORY_SHARE) // block_bytes
    return min(affordable, max(usual, num_blocks_for(max_model_len, block_size)))


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold this many tokens."""
    return -(-num_tokens // block_size)
