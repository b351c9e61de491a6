"""The host's memory, from files as Linux writes them."""

import os
from pathlib import Path

import pytest

from fastinfer.utils.host_memory import HostMemory, host_memory

MACHINE = HostMemory(1001 * 16384, 16_000 * 1024 - 1024)


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 1001, "SC_PAGE_SIZE": 16384}.__getitem__)
    write(tmp_path, {"proc/meminfo": "MemTotal:       16016 kB\nMemFree:  10 kB\nMemAvailable:   15999 kB\n"})


def v2(folder: str, limit: str, usage: int, inactive: int) -> dict[str, str]:
    stat = f"anon 17\nactive_file 5\ninactive_file {inactive}\n"
    files = {"memory.max": f"{limit}\n", "memory.current": f"{usage}\n", "memory.stat": stat}
    return {f"sys/fs/cgroup/{folder}/{name}": text for name, text in files.items()}


def v1(folder: str, limit: int, usage: int, inactive: int) -> dict[str, str]:
    stat = f"inactive_file 3\ntotal_inactive_file {inactive}\n"
    files = {"memory.limit_in_bytes": f"{limit}\n", "memory.usage_in_bytes": f"{usage}\n", "memory.stat": stat}
    return {f"sys/fs/cgroup/memory/{folder}/{name}": text for name, text in files.items()}


def test_a_machine_without_groups(tmp_path: Path) -> None:
    assert host_memory(tmp_path) == MACHINE
    write(tmp_path, {"proc/meminfo": "MemTotal:       16016 kB\n"})  # as before Linux 3.14
    assert host_memory(tmp_path) == (MACHINE.total, MACHINE.total)
    (tmp_path / "proc/meminfo").unlink()
    assert host_memory(tmp_path) == (MACHINE.total, MACHINE.total)


@pytest.mark.parametrize(
    ("group", "files", "expected"),
    [
        ("0::/", v2("", "9000", 5000, 1000), (9000, 5000)),
        ("0::/", v2("", "max", 5000, 1000), MACHINE),
        ("0::/", v2("", "9000", 9500, 100), (9000, 0)),
        ("0::/a/b", v2("a", "9000", 5000, 1000) | v2("a/b", "max", 4000, 1000), (9000, 5000)),
        ("0::/a/b", v2("a", "9000", 5000, 1000) | v2("a/b", "8000", 100, 0), (8000, 5000)),
        ("0::/a/b", v2("a", "9000", 5000, 1000) | v2("a/c", "10", 10, 0), (9000, 5000)),
        ("0::/outside/x", v2("", "9000", 5000, 1000), (9000, 5000)),
        ("0::/../x", v2("", "9000", 5000, 1000), (9000, 5000)),
        ("4:cpu,memory:/a\n0::/", v1("a", 9000, 5000, 1000) | v1("", 2**63 - 4096, 20, 0), (9000, 5000)),
        ("4:memory:/docker/x", v1("", 9000, 5000, 1000), (9000, 5000)),
        ("4:memory:/", v1("", 2**63 - 4096, 5000, 1000), MACHINE),
        ("3:cpu:/a", v1("a", 9000, 5000, 1000), MACHINE),
    ],
    ids=[
        *("limit", "no limit", "more than the limit", "ancestor", "several", "other group"),
        *("path outside", "path above", "v1", "v1 path outside", "v1 no limit", "v1 other controller"),
    ],
)
def test_the_limits_of_a_container(
    group: str, files: dict[str, str], expected: tuple[int, int], tmp_path: Path
) -> None:
    write(tmp_path, {"proc/self/cgroup": f"{group}\n", **files})
    assert host_memory(tmp_path) == expected
