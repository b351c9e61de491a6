"""Runs the emulated tests under AddressSanitizer and ThreadSanitizer, a part of them per core: ``make emulation``.

The sanitizers' runtimes must be in the process from its start, and ThreadSanitizer needs an address space without much
randomisation; so pytest is started with both settled. Arguments are passed on to pytest.
"""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from support.sanitizers import OPTIONS, without_randomisation

from emulation import build

ROOT = Path(__file__).parent.parent.parent
RUNTIMES = {"address": "libasan.so", "thread": "libtsan.so"}
PARTS = {"thread": 4, "address": 2}  # of about two minutes each
TIMEOUT_S = 1800
NO_TESTS = 5  # pytest's exit code where arguments leave a part without any


def library(name: str) -> str:
    find = ["gcc", f"-print-file-name={name}"]
    return subprocess.run(find, capture_output=True, text=True, check=True).stdout.strip()


def run(sanitizer: str, part: str, arguments: list[str]) -> tuple[int, float, str]:
    """Exit code, seconds and output of a part of the tests under one sanitizer."""
    # AddressSanitizer looks for what throws exceptions when it starts.
    preload = [library(RUNTIMES[sanitizer]), library("libstdc++.so.6")]
    environment = os.environ | OPTIONS
    environment |= {
        "FASTINFER_EMULATION": sanitizer,
        "FASTINFER_EMULATION_PART": part,
        "LD_PRELOAD": ":".join(preload),
    }
    # Not capturing file descriptors: a sanitizer's report would be lost with the process that it ends.
    pytest = ["-m", "pytest", "-m", "emulated", "--capture=sys", "-p", "no:cacheprovider"]
    prefix = without_randomisation()
    if prefix is None:
        return 1, 0, "ThreadSanitizer needs less address randomisation than this machine has, and may not switch it off"
    command = [*prefix, sys.executable, *pytest, *arguments]
    start = time.monotonic()
    try:
        tests = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as expired:
        return 1, TIMEOUT_S, f"{(expired.stdout or b'').decode(errors='replace')}\ntook more than {TIMEOUT_S} s"
    return tests.returncode, time.monotonic() - start, tests.stdout


def main(arguments: list[str]) -> int:
    for sanitizer in RUNTIMES:
        build.build(sanitizer)
    failed = False
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        jobs = [(sanitizer, f"{part}/{parts}") for sanitizer, parts in PARTS.items() for part in range(1, parts + 1)]
        runs = [pool.submit(run, *job, arguments) for job in jobs]
        for (sanitizer, part), result in zip(jobs, runs, strict=True):
            code, seconds, output = result.result()
            failed |= code not in (0, NO_TESTS)
            print(f"---- {sanitizer} {part}: exit code {code} after {seconds:.0f} s\n{output}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
