"""Ranks on GPUs: what is refused, and a whole model on two fake GPUs, whose kernels run on the emulator."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.mixed_decoder import CONFIG
from support.paths import ROOT

from fastinfer.engine.config import EngineConfig
from fastinfer.engine.placement import room_on_ranks
from fastinfer.errors import RequestError
from fastinfer.parallel.support import check_gpus


@pytest.mark.emulated
@pytest.mark.unsanitized
@pytest.mark.parametrize(("tests", "count"), [("models", 6), ("host memory", 1)])
def test_models_on_two_fake_gpus(tests: str, count: int, emulated_library: Path) -> None:
    variables = {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "tests/support/fake_gpu"), str(ROOT / "python")]),
        "FASTINFER_FAKE_GPU": str(emulated_library),
        "FASTINFER_FAKE_GPUS": "2",
    }
    command = [sys.executable, "-m", "pytest", "-n", "0", "tests/engine/test_cuda_ranks.py"]
    command += ["-k", "host_memory" if tests == "host memory" else "not host_memory"]
    run = subprocess.run(command, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"{count} passed" in run.stdout, run.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "tensor_parallel_layout must be reduce with tensor_parallel_size=2 on GPUs, got 'gather'"),
        (
            {"tensor_parallel_layout": "reduce", "async_scheduling": True},
            "async_scheduling must be None with tensor_parallel_size=2 on GPUs, got True",
        ),
        (
            {"tensor_parallel_layout": "reduce", "pipeline_parallel_size": 2},
            "device must be cpu with pipeline_parallel_size=2, got 'cuda:1'",
        ),
    ],
)
def test_refused_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        EngineConfig(device="cuda:1", tensor_parallel_size=2, **options)


def test_ranks_have_consecutive_gpus_and_launch_no_step_ahead() -> None:
    config = EngineConfig(device="cuda:1", tensor_parallel_size=3, tensor_parallel_layout="reduce")
    assert [config.device_of(rank) for rank in range(3)] == ["cuda:1", "cuda:2", "cuda:3"]
    assert not config.runs_ahead
    assert EngineConfig(device="cuda:1").runs_ahead
    assert EngineConfig(tensor_parallel_size=2).device_of(1) == "cpu"


@pytest.mark.parametrize(("size", "share"), [(2, 1 / 2), (3, 2 / 4), (4, 1 / 4)])
def test_room_for_the_caches_of_ranks(size: int, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest part counts: one of three ranks has two of 4 KV heads."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (900, 1000))
    options: dict[str, Any] = {"tensor_parallel_size": size, "tensor_parallel_layout": "reduce"}
    config = EngineConfig(device="cuda:0", gpu_memory_utilization=0.5, **options)
    model = replace(CONFIG, num_heads=8, num_kv_heads=4, kv_shapes=())
    room = room_on_ranks(config, model, weight_bytes=120 * size)
    assert (room.free, room.default) == (780 / share, 280 / share)


def test_refused_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 10)
    check_gpus(["cuda:0", "cuda:1", "cuda:2"])
    for numbers, message in {
        range(9): "tensor_parallel_size must be at most 8 on GPUs, got 9",
        range(8, 11): "tensor_parallel_size=3 needs the GPUs cuda:8 to cuda:10, got 10 in all",
    }.items():
        with pytest.raises(RequestError, match=message):
            check_gpus([f"cuda:{number}" for number in numbers])
