"""A process that renders chat templates with limits of time and memory.

A template comes from the model's file. ``'%1000000000d' | format(1)``, ``'a' * 10**9``, ``10**10**10``, nested loops,
lists that contain the same list twice, and several filters take time and memory without bound, and inside Python
nothing can interrupt them. A limited environment would have to know the cost of every operator, method and filter of
the present and the next jinja2. The kernel's limits on a process hold for all of them.
"""

import atexit
import json
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
import markupsafe

from fastinfer.errors import RequestError
from fastinfer.utils.forks import renew_in_children

MEMORY = 1 << 29  # bytes of address space; 30 MB are in use before the first template
SECONDS = 4  # of processor time for one conversation
WAITING_SECONDS = 60  # for an answer: a busy machine takes longer, and a process that is stopped never answers

_PROGRAM = Path(__file__).parent / "template_worker.py"


class TemplateProcess:
    """A process that is started on first use, and again after a template has ended it.

    Its methods may be called from several threads.

    Args:
        memory: bytes of address space.
        seconds: processor time of a call; the kernel ends the process up to one second later.
        waiting_seconds: time of a call, after which the process is ended.
    """

    def __init__(self, memory: int = MEMORY, seconds: int = SECONDS, waiting_seconds: float = WAITING_SECONDS) -> None:
        self._memory = memory
        self._seconds = seconds
        self._waiting_seconds = waiting_seconds
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        atexit.register(self.close)
        renew_in_children(self)

    def render(self, template: str, variables: Mapping[str, Any]) -> tuple[str, str]:
        """Render a template.

        Args:
            template: Jinja source.
            variables: variables of the template, of types that JSON has.

        Returns:
            "text" and the text; or "invalid" (no Jinja), "unsafe" (forbidden by the sandbox), "failed" (an error on
            these variables) or "limit" (too much time or memory), and a message.

        Raises:
            RequestError: a variable is of another type.
        """
        try:
            request = json.dumps((template, variables), default=_plain)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"messages and variables of the chat template: expected JSON: {error}") from None
        with self._lock:
            try:
                line = self._exchange(request)
            except BaseException:  # such as Ctrl-C: the answer to this request must not become that of the next one
                self.close()
                raise
            if not line:
                self.close()
                limits = f"{self._seconds} s of processor time, {self._waiting_seconds} s or {self._memory >> 20} MiB"
                return "limit", f"more than {limits}"
        kind, text = json.loads(line)
        return kind, text

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _exchange(self, request: str) -> str:
        """Send a request and return the answer; "" if the process ends before it answers."""
        if self._process is not None and self._process.poll() is not None:  # killed since the last answer
            self.close()
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(self._waiting_seconds, process.kill)
        timer.start()
        try:
            process.stdin.write(request + "\n")
            process.stdin.flush()
            return process.stdout.readline()
        except BrokenPipeError:
            return ""
        finally:
            timer.cancel()

    def _start(self) -> "subprocess.Popen[str]":
        paths = {str(Path(module.__file__).parents[1]) for module in (jinja2, markupsafe) if module.__file__}
        return subprocess.Popen(
            # Without site and the environment's settings: none of them is needed, and some are slow.
            [sys.executable, "-I", "-S", str(_PROGRAM), str(self._memory), str(self._seconds), *sorted(paths)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="ascii",  # json.dumps escapes the rest
            start_new_session=True,  # Ctrl-C is for the program that called
        )

    def renew_after_fork(self) -> None:
        """Leave the process to the parent."""
        self._process = None
        self._lock = threading.Lock()


def _plain(value: object) -> Any:
    """Return what JSON has in place of a mapping of another class."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__name__} cannot be written")
