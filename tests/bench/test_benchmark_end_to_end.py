"""The end-to-end benchmark's arithmetic and files, on a model that is none."""

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fake_clock import FakeClock
from support.fake_llm import FakeLLM

from fastinfer.benchmarks import end_to_end, report
from fastinfer.benchmarks.process_memory import peak_memory
from fastinfer.cli.main import main
from fastinfer.errors import RequestError
from fastinfer.outputs import RequestOutput

Captured = pytest.CaptureFixture[str]


class FourTokens(FakeLLM):
    """Generates 4 tokens, whatever is asked for."""


@pytest.mark.parametrize(
    ("percent", "expected"), [(0, 1.0), (1, 1.0), (25, 1.0), (26, 2.0), (50, 2.0), (95, 4.0), (100, 4.0)]
)
def test_percentile(percent: float, expected: float) -> None:
    assert report.percentile([3.0, 1.0, 4.0, 2.0], percent) == expected


def test_percentile_of_one_sample() -> None:
    assert [report.percentile([7.0], p) for p in (0, 50, 99)] == [7.0] * 3


def test_result_from_samples() -> None:
    single = [
        end_to_end.Single(first_token_s=0.5, gaps_s=[0.1, 0.1], num_decoded=2),
        end_to_end.Single(first_token_s=0.25, gaps_s=[0.2, 0.3], num_decoded=2),
        end_to_end.Single(first_token_s=1.0, gaps_s=[0.05, 0.05], num_decoded=2),
    ]
    result = end_to_end.Result.of(100, single, batch_s=[2.0, 4.0, 1.0], batch_tokens=48)
    assert result.first_token_s == 0.5
    assert result.prompt_tokens_per_s == 200
    assert math.isclose(result.decode_tokens_per_s, 10)
    assert result.inter_token_s == {50: 0.1, 95: 0.3, 99: 0.3}
    assert result.throughput_tokens_per_s == 24


def test_measure_asks_for_what_it_says() -> None:
    llm = FourTokens("model")
    results = end_to_end.measure(llm, [5, 9], 4, 3, 2, progress=False)  # type: ignore[arg-type]
    assert [result.prompt_tokens for result in results] == [5, 9]
    for result in results:
        assert len(result.single) == len(result.batch_s) == 2
        assert all(len(run.gaps_s) == run.num_decoded == 3 for run in result.single)
    methods = [method for method, _, _ in llm.asked]
    assert methods == (["stream_outputs"] * 3 + ["generate"] * 2) * 2
    prompts = [
        tuple(prompt["prompt_token_ids"])
        for method, asked, _ in llm.asked
        for prompt in (asked if method == "generate" else [asked])
    ]
    assert [len(prompt) for prompt in prompts] == [5] * 9 + [9] * 9
    assert len(set(prompts)) == 18  # none can profit from another's cached prefix
    assert all(params.ignore_eos and params.temperature == 0 for _, _, params in llm.asked)


def test_measure_refuses_missing_tokens() -> None:
    with pytest.raises(RequestError, match=r"expected 5 new tokens after 2 prompt tokens, got 4"):
        end_to_end.measure(FourTokens("model"), [2], 5, 1, 1, progress=False)  # type: ignore[arg-type]


def test_an_output_may_have_several_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speculation may bring 3 of 4 tokens together, here 2 s after the first one."""
    clock = FakeClock()

    class Speculative(FourTokens):
        def _run(self, prompt_token_ids: list[int]) -> Iterator[RequestOutput]:
            first, _, _, last = super()._run(prompt_token_ids)
            clock.sleep(1)
            yield first
            clock.sleep(2)
            yield last

    monkeypatch.setattr(end_to_end, "time", clock)
    [result] = end_to_end.measure(Speculative("model"), [5], 4, 1, 1, progress=False)  # type: ignore[arg-type]
    assert (result.first_token_s, result.decode_tokens_per_s) == (1.0, 1.5)
    assert result.inter_token_s == {50: 2.0, 95: 2.0, 99: 2.0}
    assert result.throughput_tokens_per_s == 4 / 3


def test_a_context_that_is_too_short_is_told_before_anything_is_measured() -> None:
    llm = FourTokens("model", max_model_len=12)
    with pytest.raises(RequestError, match=r"--context must be at least 13 for these requests, got 12"):
        end_to_end.measure(llm, [3, 9], 4, 1, 1, progress=False)  # type: ignore[arg-type]
    assert llm.asked == []


def test_every_benchmark_has_new_prompts() -> None:
    """A folder of keys and values may have those of an earlier one."""
    llms = [FourTokens("model") for _ in range(2)]
    for llm in llms:
        end_to_end.measure(llm, [20], 4, 1, 1, progress=False)  # type: ignore[arg-type]
    assert llms[0].asked[0][1] != llms[1].asked[0][1]


@pytest.mark.parametrize("matplotlib", [True, False])
def test_bench_writes_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured, matplotlib: bool
) -> None:
    if matplotlib:
        pytest.importorskip("matplotlib")
    else:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr(end_to_end, "LLM", FourTokens)
    out = tmp_path / "new/folder"
    arguments = ["bench", "--prompt-tokens", "3,7", "--new-tokens", "4", "--requests", "2", "--repeats", "2"]
    peak_before = peak_memory()
    monkeypatch.chdir(tmp_path)
    Path("m.gguf").write_bytes(b"GGUF")
    assert main([*arguments, "--out", str(out), "--model", "m.gguf"]) == 0

    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert lines[0].startswith("m.gguf: loaded in ")
    assert [line.split()[0] for line in lines[2:4]] == ["3", "7"]
    assert "2 at once tokens/s" in lines[1]
    assert "100%" in captured.err

    written = json.loads((out / "end_to_end.json").read_text())
    assert written["settings"]["prompt_tokens"] == [3, 7]
    assert written["settings"]["devices"] == ["auto"]  # the engine's; the benchmark chooses none
    assert written["machine"]["cpu"]["name"]
    assert written["date"].endswith("+00:00")
    assert peak_before <= written["peak_memory"] <= peak_memory()
    assert [len(result["single"]) for result in written["results"]] == [2, 2]
    assert (out / "end_to_end.png").exists() == matplotlib
    assert ("needs matplotlib" in captured.err) != matplotlib


def test_bench_without_out_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setattr(end_to_end, "LLM", FourTokens)
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "--prompt-tokens=2", "--new-tokens=4", "--requests=1", "--repeats=1"]) == 0
    assert list(tmp_path.iterdir()) == []


def test_bench_on_the_real_model(model_path: Path, tmp_path: Path) -> None:
    sizes = ["--prompt-tokens=8", "--new-tokens=4", "--requests=2", "--repeats=1"]
    assert main(["bench", "--model", str(model_path), *sizes, "--out", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "end_to_end.json").read_text())["results"][0]
    assert len(result["single"][0]["gaps_s"]) == 3
    assert result["throughput_tokens_per_s"] > 0
