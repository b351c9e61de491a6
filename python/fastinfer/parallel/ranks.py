"""The processes of the ranks beside rank 0, which a thread starts and watches."""

import contextlib
import os
import pickle
import selectors
import signal
import subprocess
import sys
import threading
import time
import weakref
from typing import IO, Any

from fastinfer import _C
from fastinfer.errors import RequestError
from fastinfer.parallel.group import Group
from fastinfer.utils.process_state import process_state
from fastinfer.utils.programs import module_path

# Seconds that ranks have to end by themselves, after a message or after the group was aborted.
END_SECONDS = 1.0
# Seconds between two looks at the ranks' states. One that is stopped at both is taken for dead.
LOOK_SECONDS = 0.25
# Modules are found where the parent finds them. Its death ends the process even while that imports torch.
PROGRAM = """\
import sys
sys.path[:] = sys.argv[4].split("\\n")
from fastinfer.utils.parent import end_with_parent
end_with_parent(int(sys.argv[1]))
from importlib import import_module
import_module(sys.argv[2]).main(int(sys.argv[3]))
"""


class Ranks:
    """Starts ranks 1, 2, ... of a group as processes, and ends the group if one of them ends or is stopped.

    A rank ends with this process: its standard input is a pipe from here, and a signal comes if the thread that started
    it ends. That is why the thread lives as long as the ranks.

    Args:
        group: rank 0 of the group.
        module: module whose function ``main(rank)`` is run, with a pickled task and the file descriptors of the
            group at standard input. It reports ``ready``, once or several times, or an error, in one line of standard
            output each. Between two lines it waits for rank 0, or the second would not be noticed.
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
        self._num_ready = self._num_awaited = 0
        self._changed = threading.Condition()
        self._abort_event = event = os.eventfd(0, os.EFD_CLOEXEC)
        weakref.finalize(group, os.close, event)
        group.on_abort.append(lambda: os.eventfd_write(event, 1))
        self._num_threads_before = _C.get_num_threads()
        _C.set_num_threads(num_threads)
        self._thread = threading.Thread(target=self._run, name="fastinfer-ranks", daemon=True)
        self._thread.start()

    def wait_until_ready(self) -> None:
        """Wait until all ranks have reported ``ready`` once more than at the last call.

        Raises:
            RequestError: a rank has reported an error, or has ended.
        """
        self._num_awaited += self.group.size - 1
        with self._changed:
            self._changed.wait_for(lambda: self._error or self._num_ready >= self._num_awaited)
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
        self.group.abort("the engine was closed")
        if self._thread is not threading.current_thread():
            self._thread.join()
        _C.set_num_threads(self._num_threads_before)

    def _run(self) -> None:
        """Start the processes, and end all of them once one has ended or the group was aborted."""
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._abort_event, selectors.EVENT_READ)
                for rank in range(1, self.group.size):
                    selector.register(self._start(rank), selectors.EVENT_READ, rank)
                stopped: set[int] = set()
                while all(self._is_ready(key.data) for key, _ in selector.select(LOOK_SECONDS)):
                    before, stopped = stopped, self._stopped_ranks()
                    if both := before & stopped:
                        self._fail(f"rank {min(both)} was stopped")
                        break
        except BaseException as error:
            self._fail(f"the processes could not be started: {error}")
            raise
        finally:
            self._end_all()
            self._fail("the ranks have ended")

    def _start(self, rank: int) -> IO[bytes]:
        """Start the process of a rank, and return its standard output."""
        arguments = [str(os.getpid()), self._module, str(rank), "\n".join(module_path())]
        self._processes[rank] = process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=self.group.fds,
            env=self._environment,
            start_new_session=True,  # Ctrl-C in a terminal is for rank 0 alone
        )
        assert process.stdin is not None
        process.stdin.write(self._task)
        process.stdin.flush()  # and stays open
        assert process.stdout is not None
        return process.stdout

    def _is_ready(self, rank: int | None) -> bool:
        """Read a line of a rank, and return whether it is ready; False without a rank."""
        if rank is None or self._read(rank) != "ready":
            return False
        with self._changed:
            self._num_ready += 1
            self._changed.notify_all()
        return True

    def _stopped_ranks(self) -> set[int]:
        """Return the ranks that a signal has stopped: they would keep the others waiting until the deadline."""
        return {rank for rank, process in self._processes.items() if process_state(process.pid) == "T"}

    def _read(self, rank: int) -> str:
        """Read a line of a rank, and take it for an error unless it is empty or says that the rank is ready."""
        pipe = self._processes[rank].stdout
        assert pipe is not None
        line = pipe.readline().decode(errors="replace").strip()
        if line and line != "ready":
            self._fail(f"rank {rank}: {line}")
        return line

    def _fail(self, error: str) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()
        self.group.abort(error)

    def _end_all(self) -> None:
        """Wait for all processes that were started, find out why they ended, and kill those that do not end in time."""
        self.group.abort()
        deadline = time.monotonic() + END_SECONDS
        for rank, process in self._processes.items():
            try:
                code = process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            else:
                while self._read(rank):
                    pass
                if code:
                    self._fail(f"rank {rank} ended {_how(code)}")
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def _how(code: int) -> str:
    """Describe how a process has ended."""
    return f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
