"""How benchmarks of single operators call their candidates."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import harness
import pytest
import torch
from support.paths import ROOT


def test_compare_calls_candidates_in_turns() -> None:
    order: list[str] = []
    candidates = {name: lambda x, name=name: order.append(name) or sum(range(200_000)) for name in ("a", "b")}
    timings = harness.compare(candidates, [(0,)], repeats=3, bytes_moved=1000, flops=2000)
    assert [timing.name for timing in timings] == ["a", "b"]
    assert all(len(timing.samples_s) == 3 for timing in timings)
    switches = [name for before, name in zip(["", *order], order, strict=False) if name != before]
    assert switches == ["a", "b"] * 4  # the warm-up and three samples
    assert math.isclose(timings[0].gb_per_s, 1e-6 / timings[0].median_s)
    assert math.isclose(timings[0].gflop_per_s, 2e-6 / timings[0].median_s)


def test_cold_inputs_exceed_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "COLD_BYTES", {"cpu": 1000})
    inputs = harness.cold_inputs(lambda: (torch.zeros(30), 1.5))
    assert len(inputs) * 120 > 1000
    assert len({x.data_ptr() for x, _ in inputs}) == len(inputs)
    # Calls so long that each is a sample of its own: no candidate may find what the one before it has just read.
    seen: list[int] = []
    candidates = dict.fromkeys(("a", "b"), lambda x, _: seen.append(x.data_ptr()) or sum(range(300_000)))
    harness.compare(candidates, inputs, repeats=20)
    addresses = [x.data_ptr() for x, _ in inputs]
    assert seen == [addresses[call % len(addresses)] for call in range(len(seen))]


STOPPED = """
import harness, time

def run(setting):
    setting.cases["a case"] = harness.compare({"candidate": lambda x: x}, [(0,)], repeats=1)
    print("ready", flush=True)
    time.sleep(60)

harness.main("toy", cpu=run)
"""


@pytest.mark.slow
def test_a_benchmark_that_is_stopped_keeps_its_cases(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "bench"), *sys.path])}
    command = [sys.executable, "-c", STOPPED, "--device", "cpu", "--out", str(tmp_path)]
    run = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert run.stdout is not None
    assert run.stdout.readline() == "ready\n"
    run.terminate()
    output, _ = run.communicate(timeout=60)
    assert run.returncode == 1
    assert "a case" in output
    assert list(json.loads((tmp_path / "toy.json").read_text())["cases"]) == ["a case"]
