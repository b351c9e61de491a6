"""Runs the operators' tests on the GPU, so that every test says something, whatever the others do.

    python bench/gpu_tests.py --journal FILE [--hang-s 45] [--workers 8] TEST_FILE ...

Each file has a process of pytest of its own, several at a time. If a test hangs, ends its process or breaks the GPU's
context, which fails all later tests of that process, the rest of the file runs in a new one. The journal has a line of
JSON for each test, so that it is valid whenever this program is stopped.

The same file is the plugin that writes the journal inside pytest.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
JOURNAL = "FASTINFER_GPU_TESTS_JOURNAL"
SELECT = ["-k", "cuda and not emulated"]
PRINTED_LOCK = threading.Lock()


def read(journal: Path, file: str = "") -> list[dict[str, Any]]:
    """The entries of a test file; a line that was cut off is none."""
    entries = []
    for line in journal.read_text().splitlines() if journal.exists() else []:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if entry["test"].startswith(file):
            entries.append(entry)
    return entries


def write(journal: Path, test: str, outcome: str, message: str = "") -> None:
    line = json.dumps({"test": test, "outcome": outcome, "message": message[:500]})
    with open(journal, "a") as file:
        file.write(line + "\n")


def results(journal: Path) -> dict[str, Any]:
    """How many tests had each outcome, and what those say that neither passed nor were skipped."""
    last = {entry["test"]: entry for entry in read(journal) if entry["outcome"] != "file done"}
    counts = Counter(entry["outcome"] for entry in last.values())
    bad = {name: entry for name, entry in last.items() if entry["outcome"] not in ("passed", "skipped")}
    failures = {name: f"{entry['outcome']}: {entry['message']}".rstrip(": ") for name, entry in sorted(bad.items())}
    return {"counts": dict(counts), "failures": failures}


# ---- inside pytest ----


class Plugin:
    """Notes every test's start and outcome, leaves out those that have one, and stops after a broken context."""

    def __init__(self, journal: Path) -> None:
        self.journal = journal
        self.is_broken = False

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        done = {entry["test"] for entry in read(self.journal)}
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in done])
        items[:] = [item for item in items if item.nodeid not in done]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        write(self.journal, nodeid, "started")

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed or report.when == "call" or report.skipped:
            lines = report.longreprtext.strip().splitlines() if report.failed else [""]
            message = next((line for line in lines if line.startswith("E  ")), lines[-1])
            write(self.journal, report.nodeid, report.outcome, message.removeprefix("E").strip())
        if report.failed:
            self.is_broken = self.is_broken or context_is_broken()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        if self.is_broken:  # no fixture may be torn down on this context either
            sys.stdout.flush()
            os._exit(3)

    def pytest_sessionfinish(self, session: Any, exitstatus: int) -> None:
        if exitstatus in (0, 1, 5):  # all passed, some failed, none are left
            write(self.journal, str(session.config.args[0]), "file done")


def context_is_broken() -> bool:
    import torch

    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def pytest_configure(config: Any) -> None:
    if path := os.environ.get(JOURNAL):
        config.pluginmanager.register(Plugin(Path(path)))


# ---- around it ----


def run_file(file: str, journal: Path, hang_s: float) -> None:
    """Run the tests of a file, in as many processes as that takes."""
    while True:
        known = len(read(journal, file))
        returncode, output = run_pytest(file, journal, hang_s)
        with PRINTED_LOCK:
            print(output, flush=True)
        entries = read(journal, file)
        if entries and entries[-1]["outcome"] == "file done":
            return
        reason = f"nothing for {hang_s:.0f} s" if returncode is None else f"ended its process ({returncode})"
        if len(entries) == known:  # it does not even start
            tail = " ".join(output.split()[-40:])
            write(journal, file, "failed", f"pytest: {reason}: {tail}")
            return
        if entries[-1]["outcome"] == "started":
            write(journal, entries[-1]["test"], "hung" if returncode is None else "crashed", reason)


def run_pytest(file: str, journal: Path, hang_s: float) -> tuple[int | None, str]:
    """Run pytest until it ends (exit code) or prints nothing for too long (None)."""
    command = [sys.executable, "-m", "pytest", "-v", "-p", "gpu_tests", "-p", "no:cacheprovider", *SELECT, file]
    path = os.pathsep.join([str(ROOT / "bench"), os.environ.get("PYTHONPATH", "")])
    # Of the CPU's threads each process has its share.
    variables = {JOURNAL: str(journal), "PYTHONPATH": path, "OMP_NUM_THREADS": "2", "FASTINFER_CASES": "all"}
    environment = os.environ | variables
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        # In this program's group, so that they end with it.
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
        size, changed, hung = 0, time.monotonic(), False
        while process.poll() is None:
            time.sleep(0.1)
            if (grown := os.fstat(output.fileno()).st_size) != size:
                size, changed = grown, time.monotonic()
            elif time.monotonic() - changed > hang_s:
                hung = True
                process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(10)  # the driver may not let it go
                break
        output.seek(0)
        return (None if hung else process.returncode), output.read()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("--hang-s", type=float, default=45, help="most seconds that a test may take, or the start")
    parser.add_argument("--workers", type=int, default=8, help="processes at a time")
    parser.add_argument("files", nargs="+")
    args = parser.parse_args()
    args.journal = args.journal.resolve()
    args.journal.unlink(missing_ok=True)
    with ThreadPoolExecutor(args.workers) as pool:
        files = [os.path.relpath(file, ROOT) for file in args.files]
        for future in [pool.submit(run_file, file, args.journal, args.hang_s) for file in files]:
            future.result()
    found = results(args.journal)
    print(found["counts"])
    return 1 if found["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
