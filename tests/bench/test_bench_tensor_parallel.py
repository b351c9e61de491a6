"""The benchmark of tensor parallelism, on models that take as long as they are told."""

import json
from pathlib import Path
from typing import Any

import bench_tensor_parallel
import pytest


class FakeLLM:
    def __init__(self, model: str, tensor_parallel_size: int = 1, **options: Any) -> None:
        self.size = tensor_parallel_size


def test_ranks_are_compared_with_a_process_of_as_many_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    threads: list[int] = []

    def seconds(llm: FakeLLM, *sizes: int) -> float:
        assert llm.size * threads[-1] == 3
        return 2.0 if llm.size == 1 else 4.0

    monkeypatch.setattr(bench_tensor_parallel, "LLM", FakeLLM)
    monkeypatch.setattr(bench_tensor_parallel, "set_num_threads", threads.append)
    monkeypatch.setattr(bench_tensor_parallel, "seconds", seconds)
    path = tmp_path / "ranks.json"
    bench_tensor_parallel.main(
        ["--ranks", "3", "--rounds", "2", "--sequences", "5", "--tokens", "8", "--json", str(path)]
    )
    assert capsys.readouterr().out == (
        f"5 sequences, tokens/s: one process 20.0, 3 ranks 10.0; ranks 0.50 times as fast\n{path}\n"
    )
    assert json.loads(path.read_text())["seconds"] == {"5": {"one process": [2.0, 2.0], "3 ranks": [4.0, 4.0]}}
