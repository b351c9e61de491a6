"""Memory of this machine, or of the container that the process runs in."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class HostMemory(NamedTuple):
    """Memory in bytes.

    Attributes:
        total: what the process may use at most.
        available: what it can allocate now without swapping.
    """

    total: int
    available: int


class _Files(NamedTuple):
    """Names of the files in which a version of Linux control groups has its numbers.

    Attributes:
        folder: folder of the topmost group.
        limit, usage: files in a group's folder.
        cache: name of the reclaimable part of the file cache in ``memory.stat``. It counts as used, but is freed on
            demand.
    """

    folder: str
    limit: str
    usage: str
    cache: str


_V1 = _Files("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Files("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")


def host_memory(root: Path = Path("/")) -> HostMemory:
    """Return the memory of the machine, within the limits of the process's control groups.

    Args:
        root: folder in which ``proc`` and ``sys`` are mounted.
    """
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    available = _mem_available(root, total)
    for limit, used in _limits(root):
        total, available = min(total, limit), min(available, max(0, limit - used))
    return HostMemory(total, available)


def _mem_available(root: Path, default: int) -> int:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) * 1024
    except (OSError, StopIteration):
        return default


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield the limit of each group that contains the process, and how much of it is used, both in bytes."""
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for group in groups:
        _, controllers, path = group.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        files = _V1 if controllers else _V2
        # In a container the path may be that outside of it, and then only the top folder exists: the container's own.
        top = root / files.folder
        folder = top / path.lstrip("/")
        folders = [folder, *folder.parents]
        for folder in folders[: folders.index(top) + 1]:
            try:
                limit, usage = (int((folder / name).read_text()) for name in (files.limit, files.usage))
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            except (OSError, ValueError):  # no such group, or no limit: "max"
                continue
            yield limit, usage - int(stat.get(files.cache, 0))
