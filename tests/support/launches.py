"""The kernels that calls launch on the emulator."""

import ctypes
from collections.abc import Callable
from pathlib import Path


def count_launches(library: Path, run: Callable[[], object]) -> list[str]:
    """The names of the launches of a call, in their order."""
    take = ctypes.CDLL(str(library)).emulation_launches
    take.restype = ctypes.c_char_p
    take()
    run()
    names: bytes = take()
    return names.decode().split()
