"""Runs the emulated tests under AddressSanitizer and ThreadSanitizer, a part of them per core: ``make emulation``.

Arguments are passed on to pytest.
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from support import sanitizers
from support.paths import ROOT

from emulation import build

PARTS = {"thread": 2, "address": 2}  # of some minutes each
# Of their own, which load the plain build.
WITH_PROGRAMS = ("tests/bench/test_gpu_rehearsal.py", "tests/parallel/test_gpus.py")


def files() -> list[str]:
    """Those with emulated tests: to import all others takes a minute in each process."""
    tests = (ROOT / "tests").rglob("test_*.py")
    emulated = [path for path in tests if re.search(r'"emulated"|mark\.emulated', path.read_text())]
    return sorted({str(path.relative_to(ROOT)) for path in emulated} - {*WITH_PROGRAMS})


def main(arguments: list[str]) -> int:
    for sanitizer in PARTS:
        build.build(sanitizer)
    has_paths = any(Path(ROOT, argument.partition("::")[0]).exists() for argument in arguments)
    selection = [*([] if has_paths else files()), "-m", "emulated"]
    jobs = [
        sanitizers.Job(
            f"{sanitizer} {part}/{parts}",
            sanitizer,
            [*selection, *(f"--ignore={path}" for path in WITH_PROGRAMS), *arguments],
            variables={"FASTINFER_EMULATION": sanitizer, "FASTINFER_EMULATION_PART": f"{part}/{parts}"},
        )
        for sanitizer, parts in PARTS.items()
        for part in range(1, parts + 1)
    ]
    return sanitizers.run_all(jobs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
