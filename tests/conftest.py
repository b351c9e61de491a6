"""Fixtures that several test files share, and the workers that tests are spread over."""

import gc
import os
import signal
from collections.abc import Generator
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

from fastinfer import _C, hub
from fastinfer.utils.torch_threads import set_num_threads

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
    """Three workers for two cores, as far as there is memory: a third of the time tests wait for other programs."""
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    workers = max(1, min(cores * 3 // 2, memory // WORKER_MEMORY))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // workers)))
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # programs that a test starts with more threads do not spin
    return workers


@pytest.hookimpl(trylast=True)  # after the choice by markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    from support.case_selection import chosen  # after its package is registered

    kept = chosen(items)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """Undo what a command such as ``bench --threads 2`` sets in this process: the numbers of threads.

    The barriers of torch's threads spin, where as many workers as cores or more run tests: small products then take ten
    times as long, in all tests that come after.
    """
    before, of_torch = _C.get_num_threads(), torch.get_num_threads()
    try:
        return (yield)
    finally:
        set_num_threads(before)
        torch.set_num_threads(of_torch)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules and tests stay until the end. Engines collect garbage, which takes less time without them.

    To look for garbage among what stays takes a seventh of the time in which each worker collects the tests.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()
