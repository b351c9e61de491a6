"""The counters of streams and of captured graphs, on a runtime of the test's own."""

import subprocess
from pathlib import Path

import pytest

from emulation import build


@pytest.mark.skipif(build.cuda_include() is None, reason="the CUDA toolkit's headers are missing")
def test_streams_and_graphs_have_counters_of_their_own(tmp_path: Path) -> None:
    sources = [build.HERE / "arrival_counters.cpp", build.CSRC / "common/cuda/arrival_counters.cpp"]
    options = ["-std=c++20", f"-I{build.CSRC}", "-isystem", str(build.cuda_include()), "-o", str(tmp_path / "program")]
    subprocess.run(["g++", *options, *map(str, sources)], check=True)
    run = subprocess.run([tmp_path / "program"], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == [
        "malloc(16384) A",
        "A",
        "malloc(16384) B",  # another stream
        "malloc(16384) C",  # another device
        "malloc(16384) D",  # a graph
        "malloc(20000) E",  # more for the same graph
        "E",
        "B",
        "A",
        "malloc(16384) F",  # the next graph
        "E",  # the first graph is gone
        "E",
        "malloc(16384) G",
        "fastinfer: counters for blocks that share a result: out of memory",
    ]
