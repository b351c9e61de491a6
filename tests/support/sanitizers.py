"""How programs built with ThreadSanitizer are started on any machine."""

import functools
import subprocess
from pathlib import Path

# Python itself leaks. Libraries without instrumentation, libfastinfer among them, synchronise their threads unseen.
OPTIONS = {"ASAN_OPTIONS": "detect_leaks=0", "TSAN_OPTIONS": "exitcode=66 ignore_noninstrumented_modules=1"}

SMALL_RANDOMISATION_BITS = 28  # that ThreadSanitizer's shadow memory bears


@functools.cache
def without_randomisation() -> list[str] | None:
    """What a command must begin with, so that ThreadSanitizer can place its shadow memory.

    None where that is impossible: some containers forbid a process to switch address randomisation off.
    """
    prefix = ["setarch", "-R"]
    try:
        if subprocess.run([*prefix, "true"], capture_output=True).returncode == 0:
            return prefix
    except OSError:
        pass
    bits = Path("/proc/sys/vm/mmap_rnd_bits")
    return [] if bits.exists() and int(bits.read_text()) <= SMALL_RANDOMISATION_BITS else None
