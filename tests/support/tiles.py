"""Tests of kernels in tiles: where this machine has none, in the software form, in a process of its own."""

import os
import subprocess
import sys

import pytest

from fastinfer import _C
from fastinfer.engine.roles import BF16_ISAS

in_tiles = pytest.mark.skipif(
    _C.cpu_info()["isa"] not in ("amx", "amx_emulated"), reason="this process computes nothing in tiles"
)
attention_in_bf16 = pytest.mark.skipif(
    _C.cpu_info()["isa"] not in BF16_ISAS, reason="this process computes no attention in bf16"
)


def run_in_software(file: str) -> None:
    """Run a file's other tests in a process whose tiles are emulated."""
    if not {"avx2", "fma", "f16c"} <= set(_C.cpu_info()["features"]):
        pytest.skip("emulated tiles need AVX2")
    environment = os.environ | {"FASTINFER_CPU_ISA": "amx_emulated", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-k", "not in_software", file]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout
