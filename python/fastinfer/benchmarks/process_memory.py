"""How much memory this process has needed (Linux)."""

import os


def reset_peak_memory() -> None:
    """Forget the peak so far. Where the kernel does not allow that, the peak stays that since the start."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        pass


def peak_memory() -> int:
    """The most that this process has had in memory since its start or the last reset, in bytes."""
    with open(f"/proc/{os.getpid()}/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))
