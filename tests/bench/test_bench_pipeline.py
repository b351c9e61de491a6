"""The benchmark of pipeline parallelism, on models that are none."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bench_pipeline
import pytest


class FakeLLM:
    """Answers at once."""

    def __init__(self, model: str, **options: Any) -> None:
        self.engine = SimpleNamespace(vocab_size=9)

    def generate(self, prompts: Any, params: Any) -> None:
        pass


def test_the_file_has_the_seconds_of_all_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_pipeline, "LLM", FakeLLM)
    monkeypatch.setattr(bench_pipeline, "set_num_threads", lambda count: None)
    monkeypatch.setattr(bench_pipeline, "set_in_flight", lambda llm, count: None)
    path = tmp_path / "new" / "pipeline.json"
    bench_pipeline.main(["--rounds", "2", "--chunk-tokens", "4", "--json", str(path)])
    assert capsys.readouterr().out.endswith(f"{path}\n")
    written = json.loads(path.read_text())
    assert written["options"]["chunk_tokens"] == 4
    assert all(len(taken) == 2 for cases in written["seconds"].values() for taken in cases.values())
