"""How large the KV cache is: what memory there is, and how much of it a cache takes."""

import io
import os

import pytest

from fastinfer.engine.kv_cache_size import available_memory, default_num_blocks


def test_available_memory_is_what_linux_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"/proc/meminfo": "MemTotal:       24000000 kB\nMemFree:  10 kB\nMemAvailable:   16000007 kB\n"}

    def opened(path: str) -> io.StringIO:
        if path not in files:
            raise FileNotFoundError(path)
        return io.StringIO(files[path])

    monkeypatch.setattr("builtins.open", opened)
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 1001, "SC_PAGE_SIZE": 16384}.__getitem__)
    reported = available_memory("cpu")
    files["/proc/meminfo"] = "MemTotal:       24000000 kB\n"  # as before Linux 3.14
    total_without_field = available_memory("cpu")
    files.clear()
    total_without_file = available_memory("cpu")
    monkeypatch.undo()
    assert reported == 16000007 * 1024
    assert total_without_field == total_without_file == 1001 * 16384


@pytest.mark.parametrize(
    ("max_model_len", "available_bytes", "blocks"),
    [
        (100, 10**9, 4 * 4),
        (4096, 10**9, 4 * 64),  # of 2,048 tokens each
        (100_000, 10**9, 3125),  # one long sequence, more than four of 2,048
        (100, 40_000, 10),  # a quarter of the memory
    ],
)
def test_default_size(max_model_len: int, available_bytes: int, blocks: int) -> None:
    """Blocks of 32 tokens and 1,000 bytes, for four sequences."""
    assert default_num_blocks(32, 1000, max_model_len, max_num_seqs=4, available_bytes=available_bytes) == blocks
