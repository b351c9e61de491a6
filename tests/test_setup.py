"""Tests of setup.py: messages about the CUDA versions of compiler, driver and torch, and builds without kernels."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT

pytestmark = pytest.mark.slow


def build(tmp_path: Path, nvcc: str, driver: str, torch_cuda: str | None, **variables: str) -> tuple[int, str]:
    """Exit code and output of a build with programs that only tell their versions."""
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "python/fastinfer/__init__.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    programs = {
        "nvcc": f"echo 'release {nvcc}, V{nvcc}.88'",
        "nvidia-smi": f"[ $# -eq 0 ] && echo 'Driver Version: 1.2  CUDA Version: {driver}' || echo 8.9",
        # Its last option names what the configuration chose.
        "cmake": 'for o; do case "$o" in -DFASTINFER_CUDA_ARCHS=*) echo "$o";; esac; done; exit 1',
    }
    for name, script in programs.items():
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    version = tmp_path / "torch/version.py"
    version.parent.mkdir()
    version.write_text(f"__version__ = '2.13.0'\ncuda: Optional[str] = {torch_cuda!r}\nhip: Optional[str] = None\n")
    script = "import sys, sysconfig, runpy; sysconfig.get_path = lambda *_: '.'; sys.argv = ['setup.py', 'build_ext']; "
    script += "runpy.run_path('setup.py', run_name='__main__')"
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("FASTINFER_", "CUDACXX"))}
    environment = clean | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"} | variables
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    return run.returncode, run.stdout + run.stderr


CUDA = {"FASTINFER_BUILD": "cuda"}
ARCHS = {"FASTINFER_CUDA_ARCHS": "80"}


@pytest.mark.parametrize(
    ("versions", "variables", "said"),
    [
        (("13.0", "13.0", "13.0"), {}, ["CUDA build for 89", "torch with CUDA 13.0", "ARCHS=89"]),
        (("12.8", "13.0", "13.0"), CUDA, ["CUDA build for 89", "torch with CUDA 13.0"]),
        (("13.0", "13.0", "12.6"), CUDA, ["need a driver for CUDA 13, torch one for CUDA 12.6", "ARCHS=89"]),
        (("13.0", "12.8", "12.6"), {}, ["CPU build (", "driver runs CUDA 12.8 at most", "ARCHS=\n"]),
        (("13.0", "12.8", "12.6"), CUDA, ["CUDA was asked for, but", "driver runs CUDA 12.8 at most"]),
        (("13.0", "12.8", "12.6"), ARCHS, ["does not run on this machine", "ARCHS=80"]),
        (("13.0", "13.0", None), CUDA, ["its tensors cannot be on a GPU"]),
    ],
)
def test_versions(
    tmp_path: Path, versions: tuple[str, str, str | None], variables: dict[str, str], said: list[str]
) -> None:
    returncode, output = build(tmp_path, *versions, **variables)
    assert returncode == 1  # the build's programs do nothing
    assert all(words in output for words in said), output
