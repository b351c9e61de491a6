"""A worker process, which is started again after a case has ended it."""

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from fuzz.mutate import Case

WORKER = Path(__file__).parent / "worker.py"
TIME_LIMIT = 20.0  # seconds per case, of a process that shares its cores with others
START_LIMIT = 120.0


class End(NamedTuple):
    """How a case ended: the failure, empty if there is none, the place in the code, and the kind of the message."""

    failure: str
    place: str
    kind: str = ""


def write_case(case: Case, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in case.items():
        (folder / name).write_bytes(data)


def read_case(folder: Path) -> Case:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


class Worker:
    """Answers what becomes of a case; see worker.py.

    Args:
        target: name of the reader.
        model: a GGUF case that the reader of parameters loads.
        time_limit: seconds after which a case hangs.
        program: the worker's program, which tests replace.
    """

    def __init__(self, target: str, model: Case, time_limit: float = TIME_LIMIT, program: Path = WORKER) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="fuzz"))
        self._command = [sys.executable, str(program), target, str(self._folder / "model")]
        self._time_limit = time_limit
        self._process: subprocess.Popen[bytes] | None = None
        self._count = 0
        write_case(model, self._folder / "model")

    def __enter__(self) -> "Worker":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the process and remove its files."""
        self._stop()
        shutil.rmtree(self._folder)

    def run(self, case: Case) -> End:
        """Let the worker read a case."""
        if self._process is None:
            self._start()
        self._count += 1
        # A new folder each time: the last case may still be mapped.
        folder = self._folder / str(self._count)
        write_case(case, folder)
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{folder}\n".encode())
            self._process.stdin.flush()
        answer = self._answer(self._time_limit)
        shutil.rmtree(folder)
        return answer

    def _start(self) -> None:
        reading, writing = os.pipe()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed by _stop)
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [*self._command, str(writing)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            pass_fds=[writing],
            env=environment,
        )
        os.close(writing)
        self._answers = os.fdopen(reading, "rb")
        if failure := self._answer(START_LIMIT).failure:
            raise RuntimeError(f"{' '.join(self._command)} did not start: {failure}")

    def _answer(self, time_limit: float) -> End:
        assert self._process is not None
        deadline = time.monotonic() + time_limit
        ready, _, _ = select.select([self._answers], [], [], time_limit)
        if not ready:
            self._stop()
            return End(f"took more than {time_limit:g} s", "hang")
        line = self._answers.readline()
        if line:
            return End(**json.loads(line))
        code = self._process.wait(max(0.0, deadline - time.monotonic()) + 1)
        self._errors.seek(0)
        last = self._errors.read().decode(errors="replace").strip().splitlines()[-1:]
        self._stop()
        return End(f"the process ended with exit code {code}: {' '.join(last)[:300]}", f"exit code {code}")

    def _stop(self) -> None:
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._answers.close()
        self._errors.close()
        self._process = None
