"""Tests of setup.py: messages about compiler, driver, GPU and torch, from builds without kernels."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT

pytestmark = pytest.mark.slow


def build(
    tmp_path: Path, nvcc: str, driver: str, torch_cuda: str | None, gpus: str = "8.9", **variables: str
) -> tuple[int, str]:
    """Exit code and output of a build with programs that only tell their versions and the GPUs' capabilities."""
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "python/fastinfer/__init__.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    programs = {
        "nvcc": f"echo 'release {nvcc}, V{nvcc}.88'",
        "nvidia-smi": f"[ $# -eq 0 ] && echo 'Driver Version: 1.2  CUDA Version: {driver}' || printf '%s\\n' {gpus}",
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


@pytest.mark.parametrize(
    ("gpus", "variables", "said"),
    [
        ("7.5", {}, ["CPU build (this GPU is sm_75; 80 is needed)", "ARCHS=\n"]),
        ("7.5", CUDA, ["CUDA was asked for, but this GPU is sm_75; 80 is needed"]),
        ("7.0 8.9 9.0", {}, ["CUDA build for 89;90a with", "ARCHS=89;90a\n"]),
        ("7.5", ARCHS, ["CUDA build for 80 with", "ARCHS=80\n"]),
        ("", CUDA, ["CUDA build for 80;86;89;90a with"]),
        ("", {}, ["CPU build (nvcc is there, but no GPU: "]),
    ],
)
def test_gpus(tmp_path: Path, gpus: str, variables: dict[str, str], said: list[str]) -> None:
    """Kernels are compiled for those that can run them, and a build that could not succeed is not begun."""
    returncode, output = build(tmp_path, "13.0", "13.0", "13.0", gpus, **variables)
    assert returncode == 1  # the build's programs do nothing
    assert all(words in output for words in said), output


@pytest.mark.parametrize(
    ("archs", "passed_on"),
    [("80, 90a", "80;90a"), ("80-real;", "80-real"), ("86-virtual;100", "86-virtual;100"), ("120a-real", "120a-real")],
)
def test_named_architectures(tmp_path: Path, archs: str, passed_on: str) -> None:
    _, output = build(tmp_path, "13.0", "13.0", "13.0", FASTINFER_CUDA_ARCHS=archs)
    assert f"ARCHS={passed_on}\n" in output


@pytest.mark.parametrize("arch", ["sm_90", "8.0", "75", "80a", "90a-ptx", "native"])
def test_wrong_architectures(tmp_path: Path, arch: str) -> None:
    _, output = build(tmp_path, "13.0", "13.0", "13.0", FASTINFER_CUDA_ARCHS=f"80;{arch}")
    expected = f'FASTINFER_CUDA_ARCHS must name architectures from 80 on, such as "80;90a", got {arch!r}'
    assert output.splitlines()[-1] == expected
    assert "ARCHS=80" not in output  # CMake was not called


@pytest.mark.parametrize("jobs", ["abc", "-1", "0", "1.5"])
def test_wrong_number_of_jobs(tmp_path: Path, jobs: str) -> None:
    _, output = build(tmp_path, "13.0", "13.0", "13.0", MAX_JOBS=jobs)
    assert output.splitlines()[-1] == f"MAX_JOBS must be a number of compile jobs, 1 or more, got {jobs!r}"
