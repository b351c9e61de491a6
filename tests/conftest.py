"""Fixtures that several test files share, and the workers that tests are spread over."""

import gc
import os
import zlib
from pathlib import Path

import pytest

# Ranks that are streams of one process wait for each other on the GPU: a kernel that is loaded at its first launch then
# waits for those that run.
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")

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
    slower than real ones, and differ from tested ones in few lines. Under a sanitizer, run the first case of each test,
    and of the others a quarter under each, unless FASTINFER_SANITIZED_CASES is "all". FASTINFER_EMULATION_PART, "1/4",
    is the part of these cases that this process runs.
    """
    part, parts = map(int, os.environ.get("FASTINFER_EMULATION_PART", "1/1").split("/"))
    sanitizer = os.environ.get("FASTINFER_SANITIZER")
    all_cases = os.environ.get("FASTINFER_SANITIZED_CASES") == "all"
    seen = set()
    kept, dropped = [], []
    for item in items:
        case = item.nodeid.rpartition("/")[2]  # the same ones whatever folder the file is in
        function, number, keep = case.partition("[")[0], zlib.crc32(case.encode()), True
        if item.get_closest_marker("avx512"):
            keep = function not in seen or number % 5 == 0
            seen.add(function)
        elif sanitizer:
            quarter = ("thread", "address").index(sanitizer)
            keep = number % parts == part - 1
            keep &= function not in seen or all_cases or number // parts % 4 == quarter
            seen.add(function)
        (kept if keep else dropped).append(item)
    config.hook.pytest_deselected(items=dropped)
    items[:] = kept


def pytest_collection_finish() -> None:
    """Modules and tests stay until the end. Engines collect garbage, which takes less time without them."""
    gc.collect()
    gc.freeze()
