"""Reads cases one after another in a process of their own: ``worker.py TARGET MODEL ANSWERS``.

A line of standard input names a case's folder; the answer is a line of JSON on the file descriptor ANSWERS. A process
that dies or hangs has done so by the case it was given last.
"""

import json
import os
import re
import resource
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from fastinfer.errors import FastinferError
from fuzz.readers import READERS, Reader

MEMORY = 1 << 30  # bytes of address space that a case may add
MAX_MESSAGE = 1000


def answer_to(read: Reader, folder: Path) -> dict[str, object]:
    """Read a case. ``failure`` says what is wrong, ``place`` is where it ended."""
    try:
        read(folder)
    except FastinferError as error:
        message = str(error).replace(str(folder), "")
        fault = "more than one line" if len(message.splitlines()) > 1 else ""
        fault = fault or ("too long" if len(message) > MAX_MESSAGE else "") or ("" if message else "empty")
        failure = fault and f"a message that is {fault}: {message!r:.300}"
        return {"failure": failure, "place": place_of(error), "kind": kind_of(message)}
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # panics of Rust are no Exceptions
        return {"failure": f"{type(error).__name__}: {error}"[:300], "place": place_of(error)}
    return {"failure": "", "place": "read"}


def place_of(error: BaseException) -> str:
    """Return the last places in the project's code that an error came through."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "fastinfer" in frame.filename]
    names = [f"{frame.filename.rpartition('fastinfer/')[2]}:{frame.lineno}" for frame in frames[-3:]]
    return f"{type(error).__name__} {' < '.join(reversed(names))}"


def kind_of(message: str) -> str:
    """Return the first words of a message without what it quotes: the library's messages all come from one place."""
    return " ".join(re.sub(r"'.*'|`.*`|\"[^ ]*\"|[^a-zA-Z ]", "", message).split()[:12])


def limit_memory() -> None:
    """Let further allocations fail beyond some more than what is in use."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main(target: str, model: str, answers_fd: str) -> None:
    torch.set_num_threads(1)
    read = READERS[target](Path(model))
    with os.fdopen(int(answers_fd), "w", buffering=1) as answers:
        answers.write(json.dumps({"failure": "", "place": "start"}) + "\n")
        limit_memory()
        for line in sys.stdin:
            answers.write(json.dumps(answer_to(read, Path(line.rstrip("\n")))) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
