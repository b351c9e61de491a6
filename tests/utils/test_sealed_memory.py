"""SealedMemory: contents that nobody can change, and that a writer who dies leaves to the next one."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fastinfer.utils.sealed_memory import PAGE, SealedMemory

PIECES = [b"first", bytes(range(256)) * 9000, b"", b"last"]  # over the ends of two huge pages


def fill(memory: SealedMemory) -> bytes:
    with memory.writing(sum(map(len, PIECES))) as pages:
        for piece in PIECES:
            pages.next(len(piece))[:] = piece
    return b"".join(PIECES)


def test_the_contents_stay() -> None:
    memory = SealedMemory.create()
    assert not memory.is_sealed
    expected = fill(memory)
    assert memory.is_sealed
    view = memory.read()
    assert bytes(view) == expected.ljust(2 * PAGE, b"\0")
    with pytest.raises(PermissionError):
        os.truncate(memory.descriptor, 0)
    with pytest.raises(PermissionError):
        os.pwrite(memory.descriptor, b"x", 0)
    with pytest.raises(PermissionError), memory.writing(5):
        pass
    assert bytes(view[:5]) == b"first"


def test_a_mapping_goes_with_its_last_view() -> None:
    memory = SealedMemory.create()
    fill(memory)
    inode = os.fstat(memory.descriptor).st_ino

    def count() -> int:
        return Path("/proc/self/maps").read_text().count(f" {inode} ")

    assert count() == 0
    part = memory.read()[5:7]
    assert count() == 1
    assert bytes(part) == b"\0\1"
    del part
    assert count() == 0


def test_what_was_not_completed_is_written_anew() -> None:
    memory = SealedMemory.create()
    with pytest.raises(ZeroDivisionError), memory.writing(PAGE) as pages:
        pages.next(PAGE)[:] = b"x" * (PAGE // (len(PIECES) - 4))
    assert not memory.is_sealed
    expected = fill(memory)
    assert bytes(memory.read()[: len(expected) + 1]) == expected + b"\0"


SCRIPT = """
import os, sys
from fastinfer.utils.sealed_memory import SealedMemory
memory = SealedMemory(int(sys.argv[1]))
if memory.is_sealed:
    view = memory.read()
    assert bytes(view[:5]) == b"first"
    print("read", flush=True)
    view[0] = 0
else:
    with memory.lock(), memory.writing(1000) as pages:
        pages.next(10)
        print("writing", flush=True)
        sys.stdin.read()
"""


def test_other_processes() -> None:
    memory = SealedMemory.create()

    def start() -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", SCRIPT, str(memory.descriptor)]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, pass_fds=[memory.descriptor])

    with start() as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "writing\n"
        writer.kill()
        with memory.lock():  # which has ended with the writer
            assert not memory.is_sealed
            fill(memory)
    with start() as reader:
        assert reader.communicate(timeout=60) == ("read\n", None)
    assert reader.returncode == -signal.SIGSEGV, "it could write to the memory"
    assert bytes(memory.read()[:5]) == b"first"
