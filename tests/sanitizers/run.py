"""Runs the tests of the CPU's operators under AddressSanitizer, UBSan and ThreadSanitizer: ``make sanitize``.

FASTINFER_CPU_ISA names the instruction set, portable, avx2 or avx512_vnni, and FASTINFER_SANITIZERS what runs, "thread"
or "address" instead of both. Arguments are passed on to pytest.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from support.sanitizers import SANITIZERS, Job, run_all

from sanitizers import build

TESTS = ["tests/ops", "tests/formats/test_gguf_rows.py", "tests/cpp/test_parallel.py", "tests/cpp/test_graph.py"]
# What runs Python and torch alone, compiles, or starts programs of its own; forks are too much for ThreadSanitizer.
WITHOUT = ["test_ops_compile", "test_ops_autograd", "test_ops_fakes", "test_compiled", "reference_is", "forked",
           "import_the_compiler", "too_many_threads", "noise_is_exponential"]  # fmt: skip


def job(sanitizer: str, arguments: list[str]) -> Job:
    library = build.folder_of(sanitizer) / "libfastinfer_sanitized.so"
    selection = ["-m", "not emulated and not avx512", "-k", " and ".join(f"not {name}" for name in WITHOUT)]
    # More threads than two, so that some are late; the tests set other numbers.
    variables = {"FASTINFER_CPU_ISA": build.isa(), "OMP_NUM_THREADS": "3"}
    return Job(f"{sanitizer} {build.isa()}", sanitizer, [*TESTS, *selection, *arguments], [library], variables)


def main(arguments: list[str]) -> int:
    for sanitizer in SANITIZERS:
        build.build(sanitizer)
    return run_all(job(sanitizer, arguments) for sanitizer in SANITIZERS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
