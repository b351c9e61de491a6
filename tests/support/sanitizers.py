"""How programs built with sanitizers, and tests of libraries built with them, are started on any machine."""

import functools
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from support.paths import ROOT

# Python itself leaks. Libraries without instrumentation, libfastinfer among them, synchronise their threads unseen.
OPTIONS = {"ASAN_OPTIONS": "detect_leaks=0", "TSAN_OPTIONS": "exitcode=66 ignore_noninstrumented_modules=1"}

SMALL_RANDOMISATION_BITS = 28  # that ThreadSanitizer's shadow memory bears
RUNTIMES = {"address": "libasan.so", "thread": "libtsan.so"}
# Those that run.
SANITIZERS = os.environ.get("FASTINFER_SANITIZERS", "thread address").split()
if not SANITIZERS or not RUNTIMES.keys() >= set(SANITIZERS):
    raise SystemExit(f"FASTINFER_SANITIZERS must name one or both of address and thread, got {' '.join(SANITIZERS)!r}")
TIMEOUT_S = 1800
NO_TESTS = 5  # pytest's exit code where arguments leave a part without any


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


def environment(sanitizer: str, libraries: Sequence[Path] = ()) -> dict[str, str]:
    """For a program that is not built with the sanitizer, but calls functions that are: its runtime must be in the
    process from its start, before ``libraries``."""
    # AddressSanitizer looks for what throws exceptions when it starts.
    preload = [library(RUNTIMES[sanitizer]), library("libstdc++.so.6"), *map(str, libraries)]
    # Torch's own threads, which are not examined, would spin at their barriers while as many jobs as cores run.
    return os.environ | OPTIONS | {"LD_PRELOAD": ":".join(preload), "OMP_WAIT_POLICY": "passive"}


def library(name: str) -> str:
    find = ["gcc", f"-print-file-name={name}"]
    return subprocess.run(find, capture_output=True, text=True, check=True).stdout.strip()


@dataclass(frozen=True)
class Job:
    """One run of pytest under a sanitizer: what it is called, its arguments and what it adds to the environment."""

    name: str
    sanitizer: str
    arguments: Sequence[str]
    libraries: Sequence[Path] = ()
    variables: Mapping[str, str] = field(default_factory=dict)


def run(job: Job) -> tuple[int, float, str]:
    """Exit code, seconds and output of a job."""
    # Not capturing file descriptors: a sanitizer's report would be lost with the process that it ends.
    pytest = ["-m", "pytest", "--capture=sys", "-p", "no:cacheprovider", *job.arguments]
    prefix = without_randomisation()
    if prefix is None:
        return 1, 0, "ThreadSanitizer needs less address randomisation than this machine has, and may not switch it off"
    start = time.monotonic()
    try:
        tests = subprocess.run(
            [*prefix, sys.executable, *pytest],
            cwd=ROOT,
            env=environment(job.sanitizer, job.libraries) | {"FASTINFER_SANITIZER": job.sanitizer} | job.variables,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as expired:
        return 1, TIMEOUT_S, f"{(expired.stdout or b'').decode(errors='replace')}\ntook more than {TIMEOUT_S} s"
    return tests.returncode, time.monotonic() - start, tests.stdout


def run_all(jobs: Iterable[Job]) -> int:
    """Runs jobs, as many at a time as there are cores, and prints their output; returns an exit code."""
    failed = False
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for job, result in [(job, pool.submit(run, job)) for job in jobs]:
            code, seconds, output = result.result()
            failed |= code not in (0, NO_TESTS)
            print(f"---- {job.name}: exit code {code} after {seconds:.0f} s\n{output}", flush=True)
    return 1 if failed else 0
