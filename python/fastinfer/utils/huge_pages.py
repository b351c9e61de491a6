"""Memory in 2 MB pages, for weights that every step reads from beginning to end."""

import contextlib
import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

PAGE = 2 << 20
BLOCK = 32 * PAGE  # mapped at once; pages that are never written take no memory
ALIGNMENT = 64


class HugePages:
    """Allocator that places tensors side by side in huge pages, or in ordinary pages if the system has no huge ones.

    Linux has huge pages unless ``/sys/kernel/mm/transparent_hugepage/enabled`` says ``never``. With 4 KB pages a pass
    over 100 MB looks up 24,000 addresses in the page table, and the processor's prefetchers stop at the end of each
    page. The memory is freed with the last tensor in it.
    """

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate an uninitialised tensor, aligned to 64 bytes."""
        num_bytes = math.prod(shape) * dtype.itemsize
        size = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        if size > BLOCK // 4:
            memory = _map(size)
        else:
            if size > len(self._free):
                self._free = _map(BLOCK)
            memory, self._free = self._free[:size], self._free[size:]
        return memory[:num_bytes].view(dtype).view(*shape)


def _map(size: int) -> Tensor:
    """Map uninitialised bytes that start at a page boundary."""
    mapped = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a system without huge pages
        mapped.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(mapped, dtype=torch.uint8)
    begin = -memory.data_ptr() % PAGE
    return memory[begin : begin + size]
