"""The real launch of a kernel, on a runtime that answers as the test wants."""

import subprocess
from pathlib import Path

import pytest

from emulation import build


@pytest.mark.skipif(build.cuda_include() is None, reason="the CUDA toolkit's headers are missing")
def test_a_kernel_is_prepared_once_per_device_and_errors_are_cleared_and_named(tmp_path: Path) -> None:
    sources = [build.HERE / "launch_errors.cpp", *build.LAUNCH_SOURCES]
    options = ["-std=c++20", f"-I{build.CSRC}", "-isystem", str(build.cuda_include()), "-o", str(tmp_path / "program")]
    subprocess.run(["g++", *options, *map(str, sources)], check=True)
    run = subprocess.run([tmp_path / "program"], capture_output=True, text=True, check=True)
    launched = "the launch of 1 x 1 blocks of 32 threads with 1000 bytes of shared memory failed"
    assert run.stdout.splitlines() == [
        "my_kernel: no kernel image",
        "attributes my_kernel: no kernel image",
        "attributes fastinfer: no kernel image",
        "attributes most=232432 my_kernel: no kernel image",
        f"attributes most=232432 launch(7, dependent=1) my_kernel: {launched}: no kernel image",
        "launch(7, dependent=1) ",
        "launch(7, dependent=0) ",  # as the thread wants
        "launch(7, dependent=1) ",
        "attributes most=232432 launch(7, dependent=0) ",  # compiled from PTX that does not wait
        "attributes most=232432 launch(7, dependent=0) ",  # another device
    ]
