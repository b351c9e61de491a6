"""Builds the CPU kernels of one instruction set under a sanitizer: ``build.py address|thread``."""

import os
import platform
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from emulation import build as emulation

HERE = Path(__file__).parent
SANITIZERS = ("address", "thread")


def isa() -> str:
    """The instruction set that FASTINFER_CPU_ISA names; else AVX2, which any x86-64 machine of today has."""
    default = "avx2" if platform.machine() == "x86_64" else "portable"
    return os.environ.get("FASTINFER_CPU_ISA", default)


def folder_of(sanitizer: str) -> Path:
    return HERE.parent.parent / "build" / "sanitizers" / f"{sanitizer}-{isa()}"


def build(sanitizer: str, target: str = "all") -> Path:
    """Build what changed of all, or of fastinfer_sanitized or faults; returns the folder of the results."""
    options = [f"-DSANITIZER={sanitizer}", f"-DSANITIZED_ISA={isa()}"]
    return emulation.cmake(HERE, folder_of(sanitizer), options, target)


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in SANITIZERS:
        sys.exit(f"usage: build.py {'|'.join(SANITIZERS)}")
    print(build(sys.argv[1]))
