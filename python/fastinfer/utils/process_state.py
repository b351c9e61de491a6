"""The state of a process, as the kernel reports it."""

from pathlib import Path


def process_state(pid: int) -> str:
    """Return the letter of a process's state, "" without such a process.

    "T" is a process that a signal has stopped, "Z" one that has ended and was not waited for; see proc_pid_stat(5).
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return stat.rpartition(")")[2].split()[0]  # behind the program's name, which may contain anything
