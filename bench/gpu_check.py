"""Builds, tests, checks and measures the CUDA kernels on the GPU of this machine: ``make gpu-check``.

    python bench/gpu_check.py --out DIR [--stage build|test|sanitize|bench]

It needs Python with torch, pytest and the build tools (cmake, ninja, pybind11), and nvcc, but neither a network nor a
virtual environment. The time limits of the stages add up to less than nine minutes. A failing stage does not stop the
next one.

It writes to DIR: gpu_check.json (machine, stages, all samples), gpu_check.txt (the tables), and a log per stage.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BENCH = ROOT / "bench"
# The most important ones first, because time may run out.
BENCHES = [
    "int4_gemm",
    "paged_attention",
    "decode_step",
    "gemm",
    "rms_norm",
    "sample",
    "int8_gemm",
    "rotary_embedding",
    "activation",
    "add_lora",
    "grouped_gemm",
]
NCU_METRICS = (
    "gpu__time_duration.sum,dram__throughput.avg.pct_of_peak_sustained_elapsed,"
    "sm__throughput.avg.pct_of_peak_sustained_elapsed,sm__warps_active.avg.pct_of_peak_sustained_active,"
    "launch__registers_per_thread"
)


@dataclass
class Step:
    """Command of a stage, and its exit code; None if it ran out of time or was not started."""

    name: str
    returncode: int | None
    seconds: float
    note: str = ""


@dataclass
class Stage:
    name: str
    limit_s: float
    deadline: float = 0
    steps: list[Step] = field(default_factory=list)
    log: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return bool(self.steps) and all(step.returncode == 0 for step in self.steps)

    def run(self, name: str, command: list[str], limit_s: float = 1e9, **environment: str) -> str:
        """Run a command within the stage's time limit, log its output, and return it."""
        start = time.monotonic()
        limit = min(limit_s, self.deadline - start)
        output, returncode, note = "", None, ""
        if limit < 1:
            note = "no time left"
        elif shutil.which(command[0]) is None:
            note = f"{command[0]} is not installed"
        else:
            returncode, output = run_in_group(command, limit, os.environ | environment)
            note = f"stopped after {limit:.0f} s" if returncode is None else ""
        self.steps.append(Step(name, returncode, round(time.monotonic() - start, 1), note))
        self.log.append(f"$ {' '.join(command)}\n{output}\n[{name}: exit code {returncode}] {note}\n")
        print(f"{self.name}: {name}: {'ok' if returncode == 0 else note or f'exit code {returncode}'}", flush=True)
        return output


def run_in_group(command: list[str], limit_s: float, environment: dict[str, str]) -> tuple[int | None, str]:
    """Run a command and end all processes that it started; return its exit code (None after the limit) and output."""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            returncode: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            returncode = None
        output.seek(0)
        return returncode, output.read()


# ---- stages ----


def build(stage: Stage, results: dict[str, Any]) -> None:
    environment = {"FASTINFER_BUILD": "cuda"}
    stage.run("build", [sys.executable, "setup.py", "build_ext", "--inplace"], **environment)
    stage.run("info", [sys.executable, "-m", "fastinfer", "info"], **PYTHON_PATH)


def test(stage: Stage, results: dict[str, Any]) -> None:
    files = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "device_fixture(" in path.read_text()]
    files.append(ROOT / "tests" / "emulation" / "test_emulation.py")  # the hardware is held to the same layouts
    command = [sys.executable, "-m", "pytest", "-k", "cuda and not emulated", "-rf", "--durations=5"]
    command.append("--continue-on-collection-errors")
    if has_module("xdist"):
        command += ["-n", "8"]
    output = stage.run("pytest", [*command, *map(str, files)], **PYTHON_PATH)
    results["tests"] = output.strip().splitlines()[-1:]


def sanitize(stage: Stage, results: dict[str, Any]) -> None:
    for tool in ("memcheck", "racecheck"):
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "99", "--kernel-name", "kns=fastinfer"]
        program = [sys.executable, str(BENCH / "call_operators.py")]
        output = stage.run(
            tool, [*command, *program], limit_s=stage.limit_s / 2, PYTORCH_NO_CUDA_MEMORY_CACHING="1", **PYTHON_PATH
        )
        results[tool] = [line for line in output.splitlines() if "SUMMARY" in line or line.startswith("never called")]


def bench(stage: Stage, results: dict[str, Any]) -> None:
    results["benches"] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in BENCHES:
            command = [sys.executable, str(BENCH / f"bench_{name}.py"), "--device", "cuda", "--out", folder]
            table = stage.run(f"bench_{name}", command, limit_s=stage.limit_s / 3, **PYTHON_PATH)
            found = Path(folder) / f"{name}.json"
            if found.exists():
                results["benches"][name] = json.loads(found.read_text()) | {"table": table.splitlines()[:-1]}
    profile(stage, results)


def profile(stage: Stage, results: dict[str, Any]) -> None:
    """Read hardware counters of two kernels, without changing the GPU's clocks."""
    for kernel in ("gemm", "attention"):
        # Profile the second call, because caches and clocks are cold in the first one.
        command = ["ncu", "--clock-control", "none", "--metrics", NCU_METRICS, "--csv", "-k", f"regex:{kernel}"]
        command += ["--launch-skip", "1", "--launch-count", "1", sys.executable, str(BENCH / "call_operators.py")]
        output = stage.run(f"ncu {kernel}", [*command, "--large"], limit_s=60, **PYTHON_PATH)
        results[f"ncu {kernel}"] = [line for line in output.splitlines() if line.startswith('"')]


# Time limits in seconds, less than nine minutes in total. A stage that runs alone may take longer.
STAGES: dict[str, tuple[float, Callable[[Stage, dict[str, Any]], None]]] = {
    "build": (200, build),
    "test": (90, test),
    "sanitize": (60, sanitize),
    "bench": (180, bench),
}
ALONE_LIMIT_S = 520
PYTHON_PATH = {"PYTHONPATH": os.pathsep.join([str(ROOT / "python"), os.environ.get("PYTHONPATH", "")]).rstrip(":")}


# ---- results ----


def has_module(name: str) -> bool:
    return subprocess.run([sys.executable, "-c", f"import {name}"], capture_output=True).returncode == 0


def machine() -> dict[str, Any]:
    """Return GPU, versions, commit and date, as far as they can be found out."""

    def ask(*command: str) -> str:
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        except (OSError, subprocess.TimeoutExpired):
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""

    torch_facts = ask(
        *(sys.executable, "-c"),
        "import torch; print(torch.__version__, torch.version.cuda, "
        "torch.cuda.get_device_name() if torch.cuda.is_available() else None, sep='\\n')",
    ).splitlines()
    facts = dict(zip(("torch", "torch_cuda", "gpu"), torch_facts, strict=False))
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": ask("git", "describe", "--always", "--dirty"),
        "python": sys.version.split()[0],
        "driver": ask("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "nvcc": (ask("nvcc", "--version").splitlines() or [""])[-1],
        "cores": len(os.sched_getaffinity(0)),
        **facts,
    }


def report(found: dict[str, Any]) -> Iterator[str]:
    yield from (f"{name}: {value}" for name, value in found["machine"].items())
    for stage in found["stages"]:
        yield f"\n== {stage['name']}"
        for step in stage["steps"]:
            state = "ok" if step["returncode"] == 0 else step["note"] or f"exit code {step['returncode']}"
            yield f"{step['name']:<24} {step['seconds']:>7.1f} s  {state}"
    results = found["results"]
    for name in ("tests", "memcheck", "racecheck", "ncu gemm", "ncu attention"):
        if results.get(name):
            yield from (f"\n== {name}", *results[name])
    for name, measured in results.get("benches", {}).items():
        ceilings = measured["ceilings"]
        copy, matmul = ceilings["copy_gb_per_s"], ceilings["matmul_gflop_per_s"]
        yield f"\n== {name}: copy {copy:.0f} GB/s, bf16 product {matmul:.0f} GFLOP/s"
        yield from measured["table"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--stage", choices=list(STAGES), help="run one stage only")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    stages = []
    deadline = time.monotonic()
    for name, (limit_s, run) in STAGES.items():
        if args.stage in (None, name):
            stage = Stage(name, ALONE_LIMIT_S if args.stage else limit_s)
            stage.deadline = deadline = deadline + stage.limit_s  # the next stage may use time that this one leaves
            run(stage, results)
            stages.append(stage)
            (args.out / f"{name}.log").write_text("\n".join(stage.log))
    described = [
        {"name": stage.name, "passed": stage.passed, "steps": [asdict(s) for s in stage.steps]} for stage in stages
    ]
    found = {"machine": machine(), "stages": described, "results": results}
    text = "\n".join(report(found))
    for measured in results.get("benches", {}).values():
        del measured["table"]
    (args.out / "gpu_check.json").write_text(json.dumps(found, indent=1) + "\n")
    (args.out / "gpu_check.txt").write_text(text + "\n")
    print(text)
    return 0 if all(stage.passed for stage in stages) else 1


if __name__ == "__main__":
    sys.exit(main())
