"""Memory of tensors that are mapped from files, as safetensors maps them."""

import ctypes
import mmap
from bisect import bisect_right
from pathlib import Path

from torch import Tensor

MAPS = Path("/proc/self/maps")
MADV_PAGEOUT = 21  # Linux 5.4; the module mmap does not name it


class MappedFiles:
    """The parts of this process's memory that are mapped from files, at the time of creation.

    A tensor that is one of many in a mapped file keeps the whole file mapped, and dropping it gives no memory back.
    On systems without ``/proc`` there are no such parts, and nothing is released.
    """

    def __init__(self) -> None:
        lines = MAPS.read_text().splitlines() if MAPS.exists() else []
        fields = [line.split(maxsplit=5) for line in lines]
        ranges = [f[0].split("-") for f in fields if len(f) == 6 and f[5].startswith("/")]
        self._ranges = [(int(begin, 16), int(end, 16)) for begin, end in ranges]  # sorted by the system

    def release(self, tensor: Tensor) -> None:
        """Give back the pages of a contiguous tensor, if they are mapped from a file.

        Its values stay: they are read again from the file if anybody asks for them. Pages that the tensor shares with
        its neighbours stay in memory.
        """
        begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if begin < end and self._contains(begin, end):
            # It keeps changed pages, unlike MADV_DONTNEED. An older kernel refuses it, and the memory stays in use.
            ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), MADV_PAGEOUT)

    def _contains(self, begin: int, end: int) -> bool:
        index = bisect_right(self._ranges, (begin, end)) - 1
        candidates = self._ranges[max(index, 0) : index + 2]
        return any(low <= begin and end <= high for low, high in candidates)
