"""Threads that wait read ahead of what comes next: the program read_ahead.cpp, under two sanitizers."""

import subprocess
from pathlib import Path

import pytest
from support.paths import ROOT


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_read_ahead(sanitizer: str, tmp_path: Path) -> None:
    flags = ["-std=c++20", "-O1", "-g", "-pthread", "-Wall", "-Wextra", "-Werror", f"-fsanitize={sanitizer}"]
    sources = ["-I", ROOT / "csrc", ROOT / "tests" / "cpp" / "read_ahead.cpp", "-o", tmp_path / "program"]
    subprocess.run(["g++", *flags, *sources], check=True)
    # ThreadSanitizer needs an address space without much randomisation.
    run = subprocess.run(["setarch", "-R", tmp_path / "program"], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
