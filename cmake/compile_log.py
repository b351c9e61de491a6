"""Runs a compiler, and keeps what it printed beside the object that it made: ``OBJECT.log``.

A build in which nothing changed prints nothing, so what cmake/check_cuda_build.py reads must outlive the build that
printed it. ptxas's statistics go into the log alone.
"""

import re
import subprocess
import sys
from pathlib import Path

STATISTICS = re.compile(r"ptxas info|    \d+ bytes stack frame")


def main(command: list[str]) -> int:
    run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if "-o" in command:
        Path(command[command.index("-o") + 1] + ".log").write_text(run.stdout)
    sys.stderr.writelines(line for line in run.stdout.splitlines(keepends=True) if not STATISTICS.match(line))
    return run.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
