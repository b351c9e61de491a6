"""Runs the emulated tests under AddressSanitizer and ThreadSanitizer, a part of them per core: ``make emulation``.

FASTINFER_SANITIZERS names what runs, "thread" or "address" instead of both. Arguments are passed on to pytest.
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from support import sanitizers
from support.paths import ROOT

from emulation import build

PARTS = 2  # of each sanitizer, some minutes each


def files() -> list[str]:
    """Those with emulated tests: to import all others takes a minute in each process."""
    tests = (ROOT / "tests").rglob("test_*.py")
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in tests}
    emulated = [name for name, text in texts.items() if re.search(r'"emulated"|mark\.emulated', text)]
    return sorted(name for name in emulated if "mark.unsanitized" not in texts[name])


def main(arguments: list[str]) -> int:
    for sanitizer in sanitizers.SANITIZERS:
        build.build(sanitizer)
    has_paths = any(Path(ROOT, argument.partition("::")[0]).exists() for argument in arguments)
    selection = [*([] if has_paths else files()), "-m", "emulated and not unsanitized"]
    jobs = [
        sanitizers.Job(
            f"{sanitizer} {part}/{PARTS}",
            sanitizer,
            [*selection, *arguments],
            variables={"FASTINFER_EMULATION": sanitizer, "FASTINFER_EMULATION_PART": f"{part}/{PARTS}"},
        )
        for sanitizer in sanitizers.SANITIZERS
        for part in range(1, PARTS + 1)
    ]
    return sanitizers.run_all(jobs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
