"""The end of a process with the one that started it."""

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1  # see prctl(2)


def end_with_parent(parent: int) -> None:
    """Let the kernel kill this process once the thread that started it has ended, even if this process is stopped.

    If the parent has ended before, the process ends at once.

    Args:
        parent: process id of the parent.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
