"""Fixtures that several test files share."""

import os
import zlib
from pathlib import Path

import pytest
import torch
from emulation import build

from fastinfer import hub

pytest.register_assert_rewrite("helpers", "quantized_gemm")


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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Under ThreadSanitizer run the first and a fixed fifth of each test's emulated cases.

    It is ten times slower than the plain build, and barriers do not depend on the data.
    """
    if os.environ.get("FASTINFER_EMULATION") != "thread":
        return
    seen = set()
    kept, dropped = [], []
    for item in items:
        emulated = item.get_closest_marker("emulated") is not None
        function = item.nodeid.partition("[")[0]
        first = emulated and function not in seen
        if first:
            seen.add(function)
        keep = first or not emulated or zlib.crc32(item.nodeid.encode()) % 5 == 0
        (kept if keep else dropped).append(item)
    config.hook.pytest_deselected(items=dropped)
    items[:] = kept
