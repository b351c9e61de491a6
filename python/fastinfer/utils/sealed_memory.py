"""Memory that one process fills and others read: a file in memory, which nobody can change once it is sealed."""

import contextlib
import ctypes
import errno
import fcntl
import logging
import mmap
import os
import weakref
from collections.abc import Iterator

LOG = logging.getLogger("fastinfer")

PAGE = 2 << 20  # of a huge page
SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
MAP_FIXED = 0x10  # see mmap(2)
MADV_COLLAPSE = 25  # Linux 6.1; the module mmap does not name it

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class SealedMemory:
    """A file in memory that is filled once and then sealed: no process can write to it, resize it or lift the seal.

    It has no name in any file system, and the system frees it with the last process that has it open or mapped, in
    whatever way that process ends. Child processes inherit the descriptor.

    Args:
        descriptor: descriptor of a file that :meth:`create` has made, in this process or in another one.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    @classmethod
    def create(cls) -> "SealedMemory":
        """Make an empty file, see memfd_create(2)."""
        return cls(os.memfd_create("fastinfer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))

    @property
    def is_sealed(self) -> bool:
        """Whether the contents are complete."""
        return bool(fcntl.fcntl(self.descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Exclude other processes; the lock ends with its process, and what that one left unsealed is written anew."""
        fcntl.lockf(self.descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self.descriptor, fcntl.LOCK_UN)

    @contextlib.contextmanager
    def writing(self, size: int) -> Iterator["Pages"]:
        """Give the memory to a ``with`` block, at whose end the file is sealed, unless an error is raised.

        Nothing may refer to the memory any more at that time.

        Args:
            size: number of bytes; rounded up to whole huge pages.
        """
        size = -(-size // PAGE) * PAGE
        os.ftruncate(self.descriptor, 0)  # a process may have died before it had sealed the file
        os.ftruncate(self.descriptor, size)
        address = _map(self.descriptor, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED)
        try:
            yield (pages := Pages(address, size))
            pages.collapse_rest()
        finally:
            _libc.munmap(address, size)
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, SEALS)
        if pages.small:
            LOG.warning(
                "%d of %d MB that processes share are in pages of 4 KB, which take up to half as much time again to "
                "read: %s",
                len(pages.small) * PAGE >> 20,
                size >> 20,
                "huge pages need Linux 6.1" if pages.error == errno.EINVAL else os.strerror(pages.error),
            )

    def read(self) -> memoryview:
        """Map the sealed bytes, until nothing refers to them any more; to write to them ends the process.

        The view does not say that it is read-only, because torch has no such tensors.
        """
        size = os.fstat(self.descriptor).st_size
        # Before Linux 6.7 a sealed file could not be mapped with MAP_SHARED. Pages that are only read are the file's.
        address = _map(self.descriptor, size, mmap.PROT_READ, mmap.MAP_PRIVATE)
        view = _view(address, size)
        weakref.finalize(view.obj, _libc.munmap, address, size)
        return view


class Pages:
    """Memory that is allocated from beginning to end, in huge pages if there are any.

    Args:
        address: where the memory begins.
        size: number of bytes.

    Attributes:
        small: where the system had no huge page, but many small ones.
        error: number of its last error; 0 for none.
    """

    def __init__(self, address: int, size: int) -> None:
        self.small: list[int] = []
        self.error = 0
        self._view = _view(address, size)
        self._address = address
        self._used = 0
        self._num_ready = 0

    def next(self, num_bytes: int) -> memoryview:
        """Return the next bytes, which are zero."""
        begin, self._used = self._used, self._used + num_bytes
        for start in range(self._num_ready, self._used, PAGE):
            # The system makes no huge page of nothing. One byte costs less than 512 small pages.
            self._view[start] = 0
            self._num_ready = start + PAGE
            if not self._collapse(start):
                self.small.append(start)
        return self._view[begin : self._used]

    def collapse_rest(self) -> None:
        """Try again to get huge pages for what is in small ones: there may be more memory now."""
        self.small = [start for start in self.small if not self._collapse(start)]

    def _collapse(self, start: int) -> bool:
        """Make one huge page, whatever the setting for files in memory is, and return whether it succeeded."""
        if self.error == errno.EINVAL:  # an older system
            return False
        if _libc.madvise(self._address + start, PAGE, MADV_COLLAPSE):
            self.error = ctypes.get_errno()
            return False
        return True


def _map(descriptor: int, size: int, protection: int, flags: int) -> int:
    """Map a file at the boundary of a huge page, and return the address.

    Raises:
        OSError: there is no room.
    """
    begin = _checked(_libc.mmap(None, size + PAGE, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0))
    address = -(-begin // PAGE) * PAGE
    _checked(_libc.mmap(address, size, protection, flags | MAP_FIXED, descriptor, 0))
    if address > begin:
        _libc.munmap(begin, address - begin)
    _libc.munmap(address + size, begin + PAGE - address)  # not empty, as addresses are multiples of 4 KB
    return address


def _checked(address: int | None) -> int:
    if address is None or address == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno() or errno.ENOMEM
        raise OSError(code, os.strerror(code))
    return address


def _view(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_uint8 * size).from_address(address)).cast("B")
