"""The kernels that calls launch on the emulator, and how the L2 treats the weights that they copy."""

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


def copies_by_policy(library: Path, run: Callable[[], object]) -> dict[str, tuple[int, int]]:
    """Count a call's copies that tell the L2 what to do with their data, and the addresses that they read.

    The result has both numbers by policy, "evict_first" or "evict_normal".
    """
    take = ctypes.CDLL(str(library)).emulation_policies
    take.restype = ctypes.c_char_p
    take()
    run()
    lines: bytes = take()
    found = [line.split() for line in lines.decode().splitlines()]
    return {policy: (int(copies), int(addresses)) for policy, copies, addresses in found}
