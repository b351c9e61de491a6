"""Fixtures that several test files share, and the workers that tests are spread over."""

import gc
import os
import signal
import zlib
from pathlib import Path

import pytest

# Ranks that are streams of one process wait for each other on the GPU: a kernel that is loaded at its first launch then
# waits for those that run.
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")

# Where the tests are started in the background, their process and all that it starts would ignore it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import torch
from emulation import build

from fastinfer import hub

WORKER_MEMORY = 3 << 30  # bytes that a worker needs at most

pytest.register_assert_rewrite("support")


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The default model's GGUF file, downloaded on first use."""
    return hub.resolve(hub.DEFAULT_MODEL)


@pytest.fixture(scope="session")
def emulated_library() -> Path:
    """Registers ``torch.ops.fastinfer_emulated``.

    Builds the plain version, unless FASTINFER_EMULATION names the sanitizer whose build is there already: a sanitizer's
    runtime must be in the process from its start, and forks badly (``make emulation``).
    """
    if build.cuda_include() is None:
        pytest.skip("the CUDA toolkit's headers are missing")
    sanitizer = os.environ.get("FASTINFER_EMULATION")
    folder = build.folder_of(sanitizer) if sanitizer else build.build("plain")
    library = folder / "libfastinfer_emulated.so"
    torch.ops.load_library(library)
    return library


@pytest.fixture(scope="session")
def avx512_library() -> Path:
    """Registers ``torch.ops.fastinfer_avx512``: the CPU kernels for AVX-512 on emulated instructions."""
    library = build.build_avx512("fastinfer_avx512") / "libfastinfer_avx512.so"
    torch.ops.load_library(library)
    return library


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One worker per core, as far as there is memory; workers and the programs that they start share the cores."""
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    workers = max(1, min(cores, memory // WORKER_MEMORY))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // workers)))
    return workers


@pytest.hookimpl(trylast=True)  # after the choice by markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of the emulated AVX-512 kernels run the first and a fixed share of each test's cases: they are up to fifty times
    slower than real ones, and differ from tested ones in few lines. Under a sanitizer, run the cases that ``covering``
    chooses, and no test that only repeats the kernels of others, to count draws or to compare bits, unless
    FASTINFER_SANITIZED_CASES is "all". FASTINFER_EMULATION_PART, "1/4", is the part of these cases that this process
    runs.
    """
    part, parts = map(int, os.environ.get("FASTINFER_EMULATION_PART", "1/1").split("/"))
    sanitizer = os.environ.get("FASTINFER_SANITIZER")
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(name_of(item).partition("[")[0], []).append(item)
    kept = set()
    for cases in tests.values():
        emulated = [case for case in cases if case.get_closest_marker("avx512")]
        others = [case for case in cases if not case.get_closest_marker("avx512")]
        kept.update(case for case in emulated if case is emulated[0] or number_of(case) % 5 == 0)
        if sanitizer and os.environ.get("FASTINFER_SANITIZED_CASES") != "all":
            others = [case for case in others if not case.get_closest_marker("repeats")]
            others = covering(others, ("thread", "address").index(sanitizer))
        kept.update(case for case in others if number_of(case) % parts == part - 1)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def name_of(item: pytest.Item) -> str:
    return item.nodeid.rpartition("/")[2]  # the same whatever folder the file is in


def number_of(item: pytest.Item) -> int:
    return zlib.crc32(name_of(item).encode())


def covering(cases: list[pytest.Item], half: int) -> list[pytest.Item]:
    """Return the first of a test's cases, and others that have half of the values of its parameters among them.

    The other half is the other sanitizer's.
    """
    numbers: dict[tuple[str, int], int] = {}
    values = []  # by case
    for case in cases:
        parameters = case.callspec.params if hasattr(case, "callspec") else {}
        keys = [(name, id(value)) for name, value in parameters.items()]
        values.append({numbers.setdefault(key, len(numbers)) for key in keys})
    missing = {number for number in numbers.values() if number % 2 == half}
    chosen = []
    for i in sorted(range(len(cases)), key=lambda i: (i > 0, number_of(cases[i]))):
        if i == 0 or values[i] & missing:
            chosen.append(cases[i])
            missing -= values[i]
    return chosen


def pytest_collection_finish() -> None:
    """Modules and tests stay until the end. Engines collect garbage, which takes less time without them."""
    gc.collect()
    gc.freeze()
