"""A worker whose reader does what a case's file ``fault`` says: what the fuzzer must report, and survive."""

import ctypes
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from fastinfer.errors import FastinferError
from fuzz import worker


class Unprintable(FastinferError):
    def __str__(self) -> str:
        return "two\nlines"


class Long(FastinferError):
    def __str__(self) -> str:
        return "x" * 10_000


def read(folder: Path) -> None:
    match (folder / "fault").read_text():
        case "abort":
            os.abort()
        case "segmentation fault":
            ctypes.string_at(0)
        case "exit":
            sys.exit(0)
        case "hang":
            time.sleep(1000)
        case "memory":
            bytearray(4 << 30)
        case "raw error":
            raise KeyError("a")
        case "recursion":
            read(folder)
        case "two lines":
            raise Unprintable
        case "long message":
            raise Long
        case "empty message":
            raise FastinferError
        case "refusal":
            raise FastinferError("expected something else")


if __name__ == "__main__":
    worker.READERS["faulty"] = lambda _: read
    worker.main(*sys.argv[1:])
