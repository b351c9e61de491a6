"""Writes the headers of libfastinfer.so: ``public_headers.py CSRC DESTINATION``.

Public are the headers that declare something exported, the launch plans (``*_plan.h``), and what these include. They
include each other by paths from ``csrc``; the copies do so by paths from ``fastinfer/``, so that a project's own
``common/dtype.h`` does not get in the way.
"""

import re
import shutil
import sys
from pathlib import Path

EXPORTS = re.compile(r"\bFASTINFER_(API|CPU_KERNEL)")
INCLUDE = re.compile(r'(?<=^#include ")(?=(.*)")', re.MULTILINE)


def public_headers(csrc: Path) -> dict[str, str]:
    """Paths from ``csrc``, and what is in them."""
    headers: dict[str, str] = {}
    todo = [path for path in csrc.glob("*/**/*.h") if path.match("*_plan.h") or EXPORTS.search(path.read_text())]
    while todo:
        path = todo.pop()
        name = str(path.relative_to(csrc))
        if name not in headers:
            headers[name] = path.read_text()
            todo += [csrc / included for included in INCLUDE.findall(headers[name])]
    return headers


def main(csrc: Path, destination: Path) -> None:
    shutil.rmtree(destination, ignore_errors=True)
    for name, text in public_headers(csrc).items():
        header = destination / name
        header.parent.mkdir(parents=True, exist_ok=True)
        header.write_text(INCLUDE.sub("fastinfer/", text))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
