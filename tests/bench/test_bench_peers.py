"""The comparison with other engines: who is asked what and when, what becomes of engines that fail, and the files."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bench_peers
import pytest
from bench_peers import SMALL_WORKLOADS, Comparison, Workload, measure, report, summary
from peers.process import Peer, PeerError

TEXT = list(range(2000))
SETTINGS = {"model": "model.gguf", "threads": 1, "max_tokens": 8, "max_requests": 1}


class FakePeer:
    """Answers at once; `fails_at` counts its turns."""

    def __init__(self, name: str, calls: list[tuple[str, list[list[int]], int]], fails_at: int | None = None) -> None:
        self.name, self.calls, self.fails_at = name, calls, fails_at
        self.facts = {"version": "1", "import_s": 0.5, "load_s": 0.25}

    def turn(self, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        self.calls.append((self.name, prompts, new_tokens))
        if sum(name == self.name for name, _, _ in self.calls) == self.fails_at:
            raise PeerError("out of memory")
        tokens = [[7] * new_tokens for _ in prompts]
        return {"first_token_s": 0.5, "total_s": 2.5, "tokens": tokens, "peak_memory": 1 << 20}


def run(peers: dict[str, int | None], rounds: int = 3, limit_s: float = 60.0) -> tuple[Comparison, Any, list[Any]]:
    """`peers`: name to the turn at which it fails."""
    calls: list[Any] = []
    comparison = Comparison({name: FakePeer(name, calls, fails_at) for name, fails_at in peers.items()}, {})  # type: ignore[misc]
    samples = measure(comparison, TEXT, SMALL_WORKLOADS, rounds, time.perf_counter() + limit_s)
    return comparison, samples, calls


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_peers, "PAUSE_S", 0)


def test_engines_take_turns_with_the_same_new_prompts() -> None:
    _, samples, calls = run({"fastinfer": None, "llama_cpp": None})
    warm_up = 2 * len(SMALL_WORKLOADS)
    turns = calls[warm_up:]
    assert len(turns) == 3 * 2 * len(SMALL_WORKLOADS)
    for first, second in zip(turns[::2], turns[1::2], strict=True):
        assert {first[0], second[0]} == {"fastinfer", "llama_cpp"}
        assert first[1:] == second[1:]
    assert [name for name, _, _ in turns[:: 2 * len(SMALL_WORKLOADS)]] == ["fastinfer", "llama_cpp", "fastinfer"]
    asked = [tuple(prompt) for _, prompts, _ in turns[::2] for prompt in prompts]
    assert len(set(asked)) == len(asked)  # none can be in a cache
    shapes = [(len(prompts), len(prompts[0]), new) for _, prompts, new in turns[: 2 * len(SMALL_WORKLOADS) : 2]]
    assert shapes == [(w.requests, w.prompt_tokens, w.new_tokens) for w in SMALL_WORKLOADS.values()]
    assert all(len(answers) == 3 for every in samples.values() for answers in every.values())


@pytest.mark.parametrize("fails_at", [1, 6])
def test_an_engine_that_fails_is_named_and_the_others_go_on(fails_at: int, capsys: pytest.CaptureFixture[str]) -> None:
    comparison, samples, _ = run({"fastinfer": None, "llama_cpp": fails_at})
    assert comparison.skipped == {"llama_cpp": "out of memory"}
    assert list(samples) == ["fastinfer"]
    assert all(len(answers) == 3 for answers in samples["fastinfer"].values())
    assert "skipped: llama.cpp: out of memory" in capsys.readouterr().out


@pytest.mark.parametrize("peers", [{}, {"fastinfer": 1}, {"fastinfer": len(SMALL_WORKLOADS) + 2}])
def test_without_an_engine_nothing_is_measured(
    peers: dict[str, int | None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """None has started, or the only one fails in its warm-up or in a round."""

    @contextmanager
    def start_engines(*_: Any) -> Iterator[Comparison]:
        calls: list[Any] = []
        yield Comparison({name: FakePeer(name, calls, fails_at) for name, fails_at in peers.items()}, {})  # type: ignore[misc]

    monkeypatch.setattr(bench_peers, "start_engines", start_engines)
    monkeypatch.setattr(bench_peers.hub, "resolve", lambda name: name)
    monkeypatch.setattr(bench_peers, "GGUFFile", lambda path: None)
    tokenizer = SimpleNamespace(encode=lambda text, add_special_tokens: TEXT)
    monkeypatch.setattr(bench_peers.Tokenizer, "from_gguf", lambda file: tokenizer)
    assert bench_peers.main(["--rehearse", "--out", str(tmp_path / "peers.json")]) == 1
    assert capsys.readouterr().err == "no engine could be measured\n"
    assert list(tmp_path.iterdir()) == []


def test_no_round_begins_after_the_limit_but_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    _, samples, _ = run({"fastinfer": None}, rounds=50, limit_s=-1)
    assert all(len(answers) == 1 for answers in samples["fastinfer"].values())
    assert "1 of 50 rounds" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("workload", "expected"),
    [(Workload(1, 100, 1, "prefill"), 200.0), (Workload(1, 8, 5, "decode"), 2.0), (Workload(4, 8, 5, "all"), 8.0)],
)
def test_tokens_per_s(workload: Workload, expected: float) -> None:
    assert workload.tokens_per_s({"first_token_s": 0.5, "total_s": 2.5}) == expected


def test_ratios_are_those_of_each_round() -> None:
    """The machine gets slower by ten, and both with it; medians over all rounds would hide who is faster."""

    def answers(seconds: list[float], tokens: list[int]) -> dict[str, list[dict[str, Any]]]:
        every = [{"first_token_s": s, "total_s": 2 * s, "tokens": [tokens], "peak_memory": 1} for s in seconds]
        return dict.fromkeys(SMALL_WORKLOADS, every)

    samples = {"fastinfer": answers([1, 10, 10], [1, 2, 3]), "llama_cpp": answers([3, 30, 15], [1, 2, 4])}
    facts = {name: {"version": "1", "load_s": 0.5} for name in samples}
    engines = summary(samples, SMALL_WORKLOADS, facts)
    assert set(engines["llama.cpp"]["fastinfer_is_times"].values()) == {3.0}
    assert engines["llama.cpp"]["same_tokens"] == 2
    assert engines["fastinfer"]["same_tokens"] == 3
    assert report(engines, SMALL_WORKLOADS).splitlines()[-1].split() == ["llama.cpp", *["3.00"] * 4]


def interpreter(folder: Path, script: str) -> str:
    """A stand-in for a peer's python."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("exec sleep 60", "no answer within 0.5 s"),
        ('echo \'{"error": "not installed: No module"}\'; exec sleep 60', "not installed: No module"),
        ("echo cannot load model >&2; exit 1", "cannot load model"),
        ("echo hello; exec sleep 60", "the process ended without a message"),
        ("exit 0", "the process ended without a message"),
    ],
)
def test_an_engine_that_does_not_start(tmp_path: Path, script: str, message: str) -> None:
    with pytest.raises(PeerError, match=message):
        Peer("llama_cpp", interpreter(tmp_path, script), SETTINGS, limit_s=0.5 if "0.5 s" in message else 20)


def test_tokens_that_were_not_generated_are_no_result(tmp_path: Path) -> None:
    answer = '{"first_token_s": 1, "total_s": 1, "tokens": [[1, 2], [1]], "peak_memory": 1}'
    peer = Peer(
        "llama_cpp", interpreter(tmp_path, f"echo '{{}}'; read a; read b; echo '{answer}'; read c"), SETTINGS, 20
    )
    with pytest.raises(PeerError, match=r"asked for 2 tokens for each of 2 prompts, got \[2, 1\]"):
        peer.turn([[1], [2]], 2)
    peer.close()


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_real_engines_that_are_here(model_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    arguments = ["--rehearse", "--model", str(model_path), "--threads=1", "--rounds=1", "--turn-limit-s=300"]
    arguments += ["--only=fastinfer,transformers_fp32,llama_cpp_q4_0", "--peer=llama_cpp=/no/such/python"]
    assert bench_peers.main([*arguments, f"--out={tmp_path / 'peers.json'}", f"--plot={tmp_path / 'peers.png'}"]) == 0
    results = json.loads((tmp_path / "peers.json").read_text())
    assert results["skipped"] == {"llama.cpp, Q4_0": "/no/such/python: No such file or directory"}
    assert list(results["engines"]) == ["fastinfer", "transformers fp32"]
    # Its weights at least: those of the file, and 134.5 million in fp32.
    for engine, weights in zip(results["engines"].values(), [model_path.stat().st_size, 134.5e6 * 4], strict=True):
        assert engine["load_s"] > 0
        assert weights < engine["peak_memory"] < weights + 2e9
        assert engine["version"]
        assert all(rate > 0 for rate in engine["tokens_per_s"].values())
        assert [len(answers) for answers in engine["samples"].values()] == [1] * len(SMALL_WORKLOADS)
    assert results["settings"]["threads"] == 1
    assert results["machine"]["cpu"]["name"]
    assert (tmp_path / "peers.png").stat().st_size > 1000
    assert "transformers fp32" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", ["--peer=vllm=/usr/bin/python", "--peer=llama_cpp", "--only=ollama", "--threads=0"])
def test_wrong_arguments_are_refused(wrong: str) -> None:
    with pytest.raises(SystemExit):
        bench_peers.parse([wrong])
