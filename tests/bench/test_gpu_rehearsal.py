"""``make gpu-check`` from its first to its last step on a fake GPU, with faults in some of the steps.

The copy of the tree has a fake GPU for torch (tests/support/fake_gpu) and fake programs of the CUDA toolkit; the
kernels run on the emulator. Nothing that runs on a machine with a GPU runs there for the first time, but the kernels.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from emulation import build
from support.paths import ROOT

import fastinfer

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.slow,
    pytest.mark.emulated,
    pytest.mark.unsanitized,
    pytest.mark.skipif(build.cuda_include() is None, reason="the CUDA toolkit's headers are missing"),
]

FAKE_GPU = ROOT / "tests/support/fake_gpu"
TREE = ("bench", "cmake", "csrc", "python", "tests", "setup.py", "pyproject.toml", "CMakeLists.txt", "README.md")
# Appended to a file of tests: each hinders those that come after it in its process.
FAULTY_TESTS = """
import os, time

def test_hangs(device): time.sleep(1000)
def test_after_the_hang(device): pass
def test_ends_its_process(device): os._exit(7)
def test_after_the_end(device): pass
def test_breaks_the_context(device, monkeypatch):
    def broken(): raise RuntimeError("CUDA error: an illegal memory access was encountered")
    torch.cuda.synchronize = broken
    broken()
def test_after_the_break(device): torch.cuda.synchronize()
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the project without its build, whose steps fail in several ways."""
    tree = tmp_path / "tree"
    ignored = shutil.ignore_patterns("__pycache__", "_C.*.so", "lib", "include", "data", "*.egg-info")
    for name in TREE:
        source = ROOT / name
        copy = shutil.copytree if source.is_dir() else shutil.copy
        tree.mkdir(exist_ok=True)
        copy(source, tree / name, **({"ignore": ignored} if source.is_dir() else {}))
    (tree / "bench/bench_gemm.py").write_text("raise MemoryError('out of memory')")
    (tree / "bench/bench_activation.py").unlink()
    with open(tree / "tests/ops/test_softcap.py", "a") as file:
        file.write(FAULTY_TESTS)
    shutil.copytree(FAKE_GPU / "bin", tmp_path / "bin")
    (tmp_path / "bin/ncu").unlink()
    return tree


def test_every_step_runs_and_a_fault_costs_only_itself(tree: Path, tmp_path: Path) -> None:
    library = build.build("plain") / "libfastinfer_emulated.so"
    variables = {
        "PATH": os.pathsep.join([str(tmp_path / "bin"), *os.environ["PATH"].split(os.pathsep)]),
        "PYTHONPATH": str(FAKE_GPU),
        "FASTINFER_FAKE_GPU": str(library),
        "FASTINFER_FAKE_BUILD": str(Path(fastinfer.__file__).parent),
        "FASTINFER_FAKE_BUILD_NOTE": str(tmp_path / "output"),
    }
    out = tmp_path / "out"
    command = [sys.executable, "bench/gpu_check.py", "--out", str(out), "--rehearse"]
    run = subprocess.run(command, cwd=tree, env=os.environ | variables, capture_output=True, text=True, timeout=1800)
    assert run.returncode == 1, run.stdout + run.stderr
    found: dict[str, Any] = json.loads((out / "gpu_check.json").read_text())
    log = (out / "gpu_check.log").read_text()
    assert {path.name for path in out.iterdir()} == {
        "gpu_check.json",
        "gpu_check.txt",
        "gpu_check.log",
        "tests.jsonl",
    }
    states = {step["name"]: step["note"] or step["returncode"] for stage in found["stages"] for step in stage["steps"]}
    bad = {"tests": 1, "bench_gemm": 1, "bench_activation": 2}
    bad |= dict.fromkeys(("ncu gemm", "ncu attention"), "ncu is not installed")
    assert {name: state for name, state in states.items() if state != 0} == bad, log
    assert len(states) == 22
    assert found["machine"]["gpu"] == "Fake GPU"
    results = found["results"]
    assert re.search(r"\d+ passed, \d+ deselected", results["layouts"][-1])
    check_tests(results["tests"])
    assert any("ERROR SUMMARY: 0 errors" in line for line in results["memcheck"])
    assert "never called: none" in results["racecheck"]
    for name, measured in results["benches"].items():
        timings = [timing for case in measured.get("cases", {}).values() for timing in case]
        assert any(timing["samples_s"] for timing in timings) == (f"bench_{name}" not in bad), name
        assert not [timing for timing in timings if timing["error"] and timing["name"].startswith("fastinfer")], name
    for measured in results["engine"].values():
        assert len(measured["seconds"]) == 4
        assert measured["eager_steps"] == 0
    assert all(name in (out / "gpu_check.txt").read_text() for name in states)


def check_tests(tests: dict[str, Any]) -> None:
    """The faulty ones failed as they should, and all others passed."""
    outcomes = {name.partition("::")[2].partition("[")[0]: text for name, text in tests["failures"].items()}
    assert outcomes == {
        "test_hangs": "hung: nothing for 20 s",
        "test_ends_its_process": "crashed: ended its process (7)",
        "test_breaks_the_context": "failed: RuntimeError: CUDA error: an illegal memory access was encountered",
    }
    assert tests["counts"]["passed"] > 100
