"""examples/ray_autoscaling.py in a Ray of this machine: engines are added, and streams outlive the application."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from support.paths import ROOT

pytest.importorskip("ray.serve", reason="make ray installs it")

pytestmark = pytest.mark.slow


def test_engines_are_added_and_drained(model_path: Path) -> None:
    """Each of two engines has two ranks. A story that was cut off would differ from the other ones of its client."""
    command = [sys.executable, str(ROOT / "examples/ray_autoscaling.py"), "--model", str(model_path), "--port", "8778"]
    command += ["--clients", "6", "--max-tokens", "60", "--tensor-parallel-size", "2"]
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:  # sockets need short paths
        environment = {"RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0", "RAY_ADDRESS": "local"}
        done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stderr
    assert "number of engines: 1\n" in done.stdout
    assert "number of engines: 2\ndeleting the application\n" in done.stdout
    stories = re.findall(r"client \d: stories: (\d+), different ones: (\d+), (.*)", done.stdout)
    assert len(stories) == 6
    assert all(int(count) > 0 and different == "1" and len(text) > 40 for count, different, text in stories)
