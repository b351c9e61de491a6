"""Builds, tests, checks and measures the CUDA kernels on the GPU of this machine: ``make gpu-check``.

    python bench/gpu_check.py --out DIR [--stage layouts|build|test|bench|engine|sanitize|profile ...]

It needs Python with torch, pytest and the build tools (setuptools, cmake, ninja, pybind11), and nvcc, but neither a
network nor a virtual environment. All stages together end within nine minutes; the most valuable come first, and each
may use what the others have left. A step that fails, hangs or is missing does not stop the next one.

After every step DIR has what is known until then: gpu_check.json (machine, steps, all samples), gpu_check.txt (the
tables), gpu_check.log (everything that the steps printed) and tests.jsonl (one line per test).
"""

import argparse
import contextlib
import glob
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import gpu_tests

ROOT = Path(__file__).resolve().parent.parent
BENCH = ROOT / "bench"
TOTAL_S = 530
# The most important ones first, because time may run out.
BENCHES = [
    "int4_gemm",
    "paged_attention",
    "decode_step",
    "gemm",
    "rms_norm",
    "sample",
    "int8_gemm",
    "grouped_gemm",
    "rotary_embedding",
    "activation",
    "add_lora",
    "linear_attention",
    "select_tokens",
]
# Files of tests.
REHEARSED = ["test_softcap", "test_merge_attention_states", "test_route_experts", "test_cuda_placement"]
NCU_METRICS = (
    "gpu__time_duration.sum,dram__throughput.avg.pct_of_peak_sustained_elapsed,"
    "sm__throughput.avg.pct_of_peak_sustained_elapsed,sm__warps_active.avg.pct_of_peak_sustained_active,"
    "launch__registers_per_thread"
)
# Where the toolkit's programs are if they are not on the PATH.
TOOL_FOLDERS = ["/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer", "/opt/nvidia/nsight-compute/*"]
NO_NETWORK = {
    "HF_HUB_OFFLINE": "1",
    "PIP_NO_INDEX": "1",
    "PIP_RETRIES": "0",
    # Nothing listens there, so that an attempt fails at once, where an unreachable network would make it wait.
    **dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9"),
}


def environment() -> dict[str, str]:
    """Return the environment of all steps."""
    folders = [os.environ.get("PATH", ""), sysconfig.get_path("scripts")]
    folders += [folder for pattern in TOOL_FOLDERS for folder in sorted(glob.glob(pattern), reverse=True)]
    python_path = [str(ROOT / "python"), *filter(None, [os.environ.get("PYTHONPATH")])]
    paths = {"PATH": os.pathsep.join(folders), "PYTHONPATH": os.pathsep.join(python_path), "PYTHONUNBUFFERED": "1"}
    return os.environ | NO_NETWORK | paths


class Check:
    """The steps of a run, and what is known of them."""

    def __init__(self, out: Path, total_s: float, rehearsal: bool = False) -> None:
        self.out = out
        self.rehearsal = rehearsal
        self.found: dict[str, Any] = {"machine": {}, "stages": [], "results": {}}
        self.environment = environment()
        self._end = self._stage_end = time.monotonic() + total_s

    @property
    def results(self) -> dict[str, Any]:
        found: dict[str, Any] = self.found["results"]
        return found

    @property
    def left_s(self) -> float:
        """Seconds that are left to the stage."""
        return self._stage_end - time.monotonic()

    def stage(self, name: str, limit_s: float, run: Callable[["Check"], None]) -> None:
        """Run a stage's steps, which end before its limit and the total one."""
        self._stage_end = min(time.monotonic() + limit_s, self._end)
        self.found["stages"].append({"name": name, "steps": []})
        try:
            run(self)
        except Exception as error:  # of this program itself: the next stage may do better
            self._note({"name": name, "returncode": None, "seconds": 0, "note": f"{type(error).__name__}: {error}"})

    def step(self, name: str, command: Sequence[str], limit_s: float = 1e9, **variables: str) -> str:
        """Run a command within its limit and the stage's, and return its output, which also goes into the log."""
        start = time.monotonic()
        limit = min(limit_s, self.left_s)
        output, returncode, note = "", None, ""
        if limit < 1:
            note = "no time left"
        elif shutil.which(command[0], path=self.environment["PATH"]) is None:
            note = f"{command[0]} is not installed"
        else:
            returncode, output = run_in_group(command, limit, self.environment | variables, self.out / "gpu_check.log")
            note = f"stopped after {limit:.0f} s" if returncode is None else ""
        seconds = round(time.monotonic() - start, 1)
        self._note({"name": name, "returncode": returncode, "seconds": seconds, "note": note})
        return output

    def _note(self, step: dict[str, Any]) -> None:
        stage = self.found["stages"][-1]
        stage["steps"].append(step)
        print(f"{stage['name']}: {step['name']}: {state(step)} after {step['seconds']} s", flush=True)
        self.save()

    def save(self) -> None:
        """Write all that is known. A file is replaced as a whole, so that it is valid at any time."""
        json_text = json.dumps(self.found, indent=1) + "\n"
        for name, text in (("gpu_check.json", json_text), ("gpu_check.txt", "\n".join(report(self.found)) + "\n")):
            new = self.out / f".{name}.new"
            try:
                new.write_text(text)
                new.replace(self.out / name)
            except OSError as error:  # a full disk; what is printed at the end may still arrive
                print(f"{name}: {error}", flush=True)
                with contextlib.suppress(OSError):
                    new.unlink(missing_ok=True)

    @property
    def passed(self) -> bool:
        steps = [step for stage in self.found["stages"] for step in stage["steps"]]
        return bool(steps) and all(step["returncode"] == 0 for step in steps)


def run_in_group(
    command: Sequence[str], limit_s: float, variables: dict[str, str], log: Path
) -> tuple[int | None, str]:
    """Run a command and end all processes that it started; return its exit code (None after the limit) and output."""
    try:
        file = open(log, "a+", errors="replace")  # noqa: SIM115
    except OSError:
        file = tempfile.TemporaryFile("a+", errors="replace")  # noqa: SIM115
    with file:
        with contextlib.suppress(OSError):
            file.write(f"\n$ {' '.join(command)}\n")
            file.flush()
        begin = os.fstat(file.fileno()).st_size
        process = subprocess.Popen(
            command, cwd=ROOT, env=variables, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            returncode: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            returncode = None
            os.killpg(process.pid, signal.SIGTERM)  # benchmarks print what they have
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)  # the driver may not let it go
        size = os.fstat(file.fileno()).st_size - begin
        return returncode, os.pread(file.fileno(), size, begin).decode(errors="replace")


# ---- stages ----


def layouts(check: Check) -> None:
    """Each instruction's layout, before anything that is built on them; it needs no fastinfer."""
    command = [sys.executable, "-m", "pytest", "--noconftest", "-v", "-rf", "-p", "no:cacheprovider", "-k", "cuda"]
    output = check.step("layouts", [*command, "tests/emulation/test_emulation.py"])
    check.results["layouts"] = [
        line
        for line in output.splitlines()
        if line.startswith(("FAILED", "ERROR")) or (line.startswith("=") and " in " in line)
    ]


def build(check: Check) -> None:
    variables = {"FASTINFER_BUILD": "cuda"}
    if arch := check.found["machine"].get("arch"):
        variables["FASTINFER_CUDA_ARCHS"] = arch
    check.step("build", [sys.executable, "setup.py", "build_ext", "--inplace"], **variables)
    check.step("info", [sys.executable, "-m", "fastinfer", "info"], limit_s=60)


def test(check: Check) -> None:
    files = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "device_fixture(" in path.read_text()]
    files = [path for path in files if path.stem in REHEARSED] if check.rehearsal else files
    journal = check.out / "tests.jsonl"
    workers = str(max(1, min(8, len(os.sched_getaffinity(0)) // 2)))
    command = [sys.executable, str(BENCH / "gpu_tests.py"), "--journal", str(journal), "--workers", workers]
    command += ["--hang-s", "20"] if check.rehearsal else []
    check.step("tests", [*command, *map(str, files)])
    check.results["tests"] = gpu_tests.results(journal)
    check.save()


def bench(check: Check) -> None:
    measured = check.results["benches"] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in BENCHES:
            command = [sys.executable, str(BENCH / f"bench_{name}.py"), "--device", "cuda", "--out", folder]
            command += [*rehearse(check), "--repeats", "2" if check.rehearsal else "20"]
            table = check.step(f"bench_{name}", command, limit_s=60)
            measured[name] = read_json(Path(folder) / f"{name}.json") | {"table": table.splitlines()}
            check.save()


def engine(check: Check) -> None:
    measured = check.results["engine"] = {}
    with tempfile.TemporaryDirectory() as folder:
        for model in ("8b",) if check.rehearsal else ("8b", "1b"):
            for weights in ("int4", "bf16"):
                name = f"engine_{model}_{weights}"
                options = ["--model", model, "--weights", weights, "--out", folder, *rehearse(check)]
                table = check.step(name, [sys.executable, str(BENCH / "bench_engine.py"), *options], limit_s=60)
                measured[name] = read_json(Path(folder) / f"{name}.json") | {"table": table.splitlines()}
                check.save()


def sanitize(check: Check) -> None:
    """Few operators: under these tools torch alone takes long to start, and every kernel runs many times slower."""
    # What torch itself probes is no error of a kernel.
    for tool, options in (("memcheck", ["--report-api-errors", "no"]), ("racecheck", [])):
        command = ["compute-sanitizer", "--tool", tool, *options, "--error-exitcode", "99"]
        command += ["--kernel-name", "kns=fastinfer", sys.executable, str(BENCH / "call_operators.py")]
        limit_s = min(150, check.left_s)
        command += ["--limit-s", f"{max(limit_s - 60, 10):.0f}"]  # after that the tool sums up
        output = check.step(tool, command, limit_s=limit_s, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
        words = "SUMMARY", "calls:", "never called", "refused", "stopped", "Invalid", "Race reported"
        check.results[tool] = [line[:200] for line in output.splitlines() if any(word in line for word in words)][-40:]
        check.save()


def profile(check: Check) -> None:
    """Read hardware counters of two kernels, without changing the GPU's clocks."""
    for name, kernel in (("gemm", "gemm_kernel"), ("attention", "paged_attention_kernel")):
        # Profile the second call, because caches and clocks are cold in the first one.
        command = ["ncu", "--clock-control", "none", "--metrics", NCU_METRICS, "--csv", "-k", f"regex:{kernel}"]
        command += ["--launch-skip", "1", "--launch-count", "1", sys.executable, str(BENCH / "call_operators.py")]
        output = check.step(f"ncu {name}", [*command, "--large", *rehearse(check)], limit_s=60)
        check.results[f"ncu {name}"] = [line for line in output.splitlines() if line.startswith('"')]
        check.save()


def rehearse(check: Check) -> list[str]:
    return ["--rehearse"] if check.rehearsal else []


# Most seconds of each stage.
STAGES: dict[str, tuple[float, Callable[[Check], None]]] = {
    "layouts": (60, layouts),
    "build": (240, build),
    "test": (120, test),
    "bench": (150, bench),
    "engine": (120, engine),
    "sanitize": (180, sanitize),
    "profile": (100, profile),
}


# ---- results ----


def read_json(path: Path) -> dict[str, Any]:
    """Return the results that a step has written; none if it was stopped before it had."""
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found


def machine(variables: dict[str, str]) -> dict[str, Any]:
    """Return GPU, versions, commit and date, as far as they can be found out."""

    def ask(*command: str) -> str:
        try:
            done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=60)
        except (OSError, subprocess.TimeoutExpired):
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""

    torch_facts = ask(
        *(sys.executable, "-c"),
        "import torch; print(torch.__version__, torch.version.cuda, sep='\\n'); torch.cuda.is_available() and "
        "print(torch.cuda.get_device_name(), '%d%d' % torch.cuda.get_device_capability(), sep='\\n')",
    ).splitlines()
    facts = dict(zip(("torch", "torch_cuda", "gpu", "arch"), torch_facts, strict=False))
    if facts.get("arch") == "90":
        facts["arch"] = "90a"
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": ask("git", "describe", "--always", "--dirty"),
        "python": sys.version.split()[0],
        "driver": ask("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "nvcc": (ask("nvcc", "--version").splitlines() or [""])[-1],
        "cores": len(os.sched_getaffinity(0)),
        **facts,
    }


def state(step: dict[str, Any]) -> str:
    return "ok" if step["returncode"] == 0 else step["note"] or f"exit code {step['returncode']}"


def report(found: dict[str, Any]) -> Iterator[str]:
    yield from (f"{name}: {value}" for name, value in found["machine"].items())
    for stage in found["stages"]:
        yield f"\n== {stage['name']}"
        yield from (f"{step['name']:<24} {step['seconds']:>7.1f} s  {state(step)}" for step in stage["steps"])
    results = found["results"]
    if tests := results.get("tests"):
        yield f"\n== tests: {', '.join(f'{count} {outcome}' for outcome, count in tests['counts'].items())}"
        yield from (f"{name}\n    {message}" for name, message in list(tests["failures"].items())[:100])
    for name in ("layouts", "memcheck", "racecheck", "ncu gemm", "ncu attention"):
        if results.get(name):
            yield from (f"\n== {name}", *results[name])
    for name, measured in (results.get("benches", {}) | results.get("engine", {})).items():
        yield f"\n== {name}"
        if ceilings := measured.get("ceilings"):
            copy, matmul = ceilings["copy_gb_per_s"], ceilings["matmul_gflop_per_s"]
            yield f"copy {copy:.0f} GB/s, bf16 product {matmul:.0f} GFLOP/s"
        yield from measured["table"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--stage", choices=list(STAGES), nargs="+", default=list(STAGES), help="run these alone")
    parser.add_argument("--rehearse", action="store_true", help="small sizes, few tests: measures nothing")
    args = parser.parse_args()
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "gpu_check.log").unlink(missing_ok=True)
    patience = 4 if args.rehearse else 1  # an emulator on a busy machine
    check = Check(args.out, TOTAL_S * patience, args.rehearse)
    check.found["machine"] = machine(check.environment)
    check.save()
    if "gpu" not in check.found["machine"]:
        print("torch sees no GPU")
        return 1
    for name in args.stage:
        limit_s, run = STAGES[name]
        check.stage(name, (limit_s if len(args.stage) > 1 else TOTAL_S) * patience, run)
    print("\n".join(report(check.found)))
    return 0 if check.passed else 1


if __name__ == "__main__":
    sys.exit(main())
