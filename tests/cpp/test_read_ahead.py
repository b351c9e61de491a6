"""Threads that wait read ahead of what comes next: the program read_ahead.cpp, under two sanitizers."""

import subprocess
from pathlib import Path

import pytest
from support.paths import ROOT
from support.sanitizers import without_randomisation

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_read_ahead(sanitizer: str, tmp_path: Path) -> None:
    prefix = without_randomisation() if sanitizer == "thread" else []
    if prefix is None:
        pytest.skip("ThreadSanitizer needs less address randomisation than this machine has")
    flags = ["-std=c++20", "-O1", "-g", "-pthread", "-Wall", "-Wextra", "-Werror", f"-fsanitize={sanitizer}"]
    sources = ["-I", ROOT / "csrc", ROOT / "tests" / "cpp" / "read_ahead.cpp", "-o", tmp_path / "program"]
    subprocess.run(["g++", *flags, *sources], check=True)
    run = subprocess.run([*prefix, tmp_path / "program"], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
