"""Opening of files that users name. Anything but a regular one is refused: reading a FIFO or a device may never end."""

import os
import stat
from typing import BinaryIO

StrPath = str | os.PathLike[str]

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class NotRegularError(OSError):
    """The path is that of a folder, a FIFO, a socket or a device; ``strerror`` says of which."""


def check_regular(path: StrPath) -> None:
    """Require a regular file, or a link to one, without opening it: for libraries that open files themselves.

    Raises:
        OSError: there is no such file, or it is not a regular one.
    """
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise NotRegularError(0, f"expected a file, got {kind}", os.fspath(path))


def open_regular(path: StrPath) -> BinaryIO:
    """Open a regular file for reading; this and all reads return at once, whatever the path becomes meanwhile.

    Raises:
        OSError: there is no such file, it is not a regular one, or it cannot be opened.
    """
    check_regular(path)
    return open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))


def read_regular(path: StrPath) -> bytes:
    """Read a whole regular file.

    Raises:
        OSError: as for :func:`open_regular`; or reading failed.
    """
    with open_regular(path) as file:
        return file.read()
