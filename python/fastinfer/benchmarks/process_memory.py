"""Peak memory of this process (Linux)."""

import os


def reset_peak_memory() -> None:
    """Reset the peak. If the kernel does not allow this, the peak remains the one since the process started."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        pass


def peak_memory() -> int:
    """Return the peak resident memory in bytes, since the last reset or the start of the process."""
    with open(f"/proc/{os.getpid()}/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))
