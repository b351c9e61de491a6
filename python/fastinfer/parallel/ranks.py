"""The processes of the ranks beside rank 0, which a thread starts and watches."""

import os
import pickle
import selectors
import signal
import subprocess
import sys
import threading
import time
from typing import Any

from fastinfer import _C
from fastinfer.errors import RequestError
from fastinfer.parallel.group import Group

# Seconds that ranks have to end by themselves, after a message or after the group was aborted.
END_SECONDS = 1.0
# The first line of a process: modules are found where its parent finds them.
PROGRAM = "import sys; sys.path[:] = sys.argv[3].split('\\n'); import {module} as m; m.main(sys.argv[1], sys.argv[2])"


class Ranks:
    """Starts ranks 1, 2, ... of a group as processes, and ends the group if one of them ends.

    A rank ends with this process: its standard input is a pipe from here, and a signal comes if the thread that started
    it ends. That is why the thread lives as long as the ranks.

    Args:
        group: rank 0 of the group.
        module: module whose function ``main(pid, rank)`` is run, with a pickled task and the file descriptors of the
            group at standard input. It reports ``ready`` or an error in one line of standard output.
        task: what the ranks shall do, of any type that can be pickled.
        num_threads: number of threads of the kernels in each rank, this one included until :meth:`close`.

    Attributes:
        group: rank 0 of the group.
    """

    def __init__(self, group: Group, module: str, task: Any, num_threads: int) -> None:
        self.group = group
        self._pid = os.getpid()
        self._module = module
        self._task = pickle.dumps((task, group.fds))
        self._environment = os.environ | {"OMP_NUM_THREADS": str(num_threads), "TQDM_DISABLE": "1"}
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._error = ""
        self._num_ready = 0
        self._changed = threading.Condition()
        self._is_closing = False
        self._num_threads_before = _C.get_num_threads()
        _C.set_num_threads(num_threads)
        self._thread = threading.Thread(target=self._run, name="fastinfer-ranks", daemon=True)
        self._thread.start()

    def wait_until_ready(self) -> None:
        """Wait until all ranks have loaded their parts.

        Raises:
            RequestError: a rank could not load its part, or has ended.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._error or self._num_ready == self.group.size - 1)
            if self._error:
                raise RequestError(self._error)

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks, from rank 1 on."""
        return [process.pid for process in self._processes.values()]

    def close(self) -> None:
        """End all ranks, at the latest after a few seconds; may be called again."""
        if os.getpid() != self._pid:  # a forked child does not end the ranks of its parent
            return
        self._is_closing = True
        self.group.abort("the engine was closed")
        if self._thread is not threading.current_thread():
            self._thread.join()
        _C.set_num_threads(self._num_threads_before)

    def _run(self) -> None:
        """Start the processes, and wait until they have ended."""
        try:
            with selectors.DefaultSelector() as selector:
                for rank in range(1, self.group.size):
                    process = self._start(rank)
                    assert process.stdout is not None
                    selector.register(process.stdout, selectors.EVENT_READ, rank)
                while all(self._read(key.data) for key, _ in selector.select()):
                    pass
        except BaseException as error:
            self._fail(f"tensor parallelism could not start its processes: {error}")
            raise
        finally:
            self._end_all()

    def _start(self, rank: int) -> "subprocess.Popen[bytes]":
        program = PROGRAM.format(module=self._module)
        arguments = [sys.executable, "-c", program, str(os.getpid()), str(rank), "\n".join(sys.path)]
        self._processes[rank] = process = subprocess.Popen(
            arguments,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=self.group.fds,
            env=self._environment,
            start_new_session=True,  # Ctrl-C in a terminal is for rank 0 alone
        )
        assert process.stdin is not None
        process.stdin.write(self._task)
        process.stdin.flush()  # and stays open
        return process

    def _read(self, rank: int) -> bool:
        """Read a line of a rank; False if it has ended."""
        process = self._processes[rank]
        assert process.stdout is not None
        line = process.stdout.readline().decode(errors="replace").strip()
        if line == "ready":
            with self._changed:
                self._num_ready += 1
                self._changed.notify_all()
            return True
        if line:
            self._fail(f"rank {rank}: {line}")
        elif not self._is_closing:
            try:
                code = process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                self._fail(f"rank {rank} closed its output")
            else:
                self._fail(f"rank {rank} ended {_how(code)}")
        return False

    def _fail(self, error: str) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()
        self.group.abort(error)

    def _end_all(self) -> None:
        """Wait for all processes that were started, and kill those that do not end in time."""
        self.group.abort()
        deadline = time.monotonic() + END_SECONDS
        for process in self._processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()


def _how(code: int) -> str:
    """Describe how a process has ended."""
    return f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
