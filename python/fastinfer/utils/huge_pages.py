"""Memory in pages of 2 MB, for what every step reads from its beginning to its end."""

import contextlib
import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

PAGE = 2 << 20
BLOCK = 32 * PAGE  # mapped at once; what is not written costs nothing
ALIGNMENT = 64


class HugePages:
    """Tensors side by side in memory of its own, where the system has huge pages to give (Linux: unless
    ``/sys/kernel/mm/transparent_hugepage/enabled`` says ``never``); else in ordinary pages.

    With pages of 4 KB a pass over 100 MB looks up 24,000 addresses in the page table, and the processor's prefetchers
    stop at the end of each. The memory lives as long as a tensor in it.
    """

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor, aligned to 64 bytes."""
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
    """Bytes that begin with a page."""
    mapped = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a system that has none
        mapped.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(mapped, dtype=torch.uint8)
    begin = -memory.data_ptr() % PAGE
    return memory[begin : begin + size]
