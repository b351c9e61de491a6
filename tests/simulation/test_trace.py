"""Trace files and generated traces."""

import math
import random
import statistics
from collections import Counter
from pathlib import Path

import pytest

from fastinfer.errors import RequestError
from fastinfer.simulation.generator import Lengths, generate_trace
from fastinfer.simulation.trace import TraceRequest, read_trace

GOOD = '{"arrival_s": 0.5, "prompt_tokens": 30, "output_tokens": 4}'


def test_a_trace_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    second = '{"arrival_s": 1, "prompt_tokens": 9, "output_tokens": 1, "prefix": "a", "prefix_tokens": 8}'
    path.write_text(f"{GOOD}\n\n \t\n{second}\r\n")
    assert read_trace(path, 100) == [TraceRequest(0.5, 30, 4), TraceRequest(1, 9, 1, "a", 8)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense", "expected a JSON object, got b'nonsense'"),
        ("[" * 100_000, "expected a JSON object"),
        (b"\xff", "expected a JSON object"),
        ("[1]", r"expected a JSON object, got \[1\]"),
        ('{"arrival_s": 0, "prompt_tokens": 1}', "output_tokens is missing"),
        ('{"arrival": 0, "prompt_tokens": 1, "output_tokens": 1}', "expected arrival_s, .*, got 'arrival'"),
        ('{"arrival_s": -1, "prompt_tokens": 1, "output_tokens": 1}', "arrival_s must be a number in"),
        ('{"arrival_s": NaN, "prompt_tokens": 1, "output_tokens": 1}', "arrival_s must be a number in"),
        ('{"arrival_s": 1e999, "prompt_tokens": 1, "output_tokens": 1}', "arrival_s must be a number in"),
        ('{"arrival_s": 0, "prompt_tokens": 0, "output_tokens": 1}', "prompt_tokens must be an integer in"),
        ('{"arrival_s": 0, "prompt_tokens": 1.0, "output_tokens": 1}', "prompt_tokens must be an integer in"),
        ('{"arrival_s": 0, "prompt_tokens": 1, "output_tokens": true}', "output_tokens must be an integer in"),
        ('{"arrival_s": 0, "prompt_tokens": 9, "output_tokens": 1, "prefix_tokens": 3}', "must come with prefix"),
        ('{"arrival_s": 0, "prompt_tokens": 9, "output_tokens": 1, "prefix": "a"}', "prefix_tokens must be an integer"),
        (
            '{"arrival_s": 0, "prompt_tokens": 9, "output_tokens": 1, "prefix": "a", "prefix_tokens": 10}',
            r"prefix_tokens must be an integer in 1\.\.9, got 10",
        ),
        ('{"arrival_s": 0, "prompt_tokens": 9, "output_tokens": 1, "prefix": 7}', "prefix must be a string"),
        ('{"arrival_s": 0, "prompt_tokens": 90, "output_tokens": 11}', "max_model_len=100 tokens together, got 90 and"),
    ],
)
def test_a_bad_line_is_refused_by_its_number(tmp_path: Path, line: str | bytes, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(f"{GOOD}\n\n".encode() + (line.encode() if isinstance(line, str) else line) + b"\n")
    with pytest.raises(RequestError, match=rf"trace\.jsonl', line 3: .*{message}") as raised:
        read_trace(path, 100)
    assert len(str(raised.value)) < 500


def test_files_that_are_no_traces(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    for name, message in (
        ("nowhere", "No such file"),
        ("empty", "expected requests"),
        ("", "expected a file, got a folder"),
    ):
        with pytest.raises(RequestError, match=message):
            read_trace(tmp_path / name, 100)


def test_generated_traces_follow_their_distributions() -> None:
    trace = generate_trace(4000, 5.0, Lengths(16, 1024), Lengths(1, 400, 50, 0.5), seed=3)
    assert trace[-1].arrival_s == pytest.approx(4000 / 5.0, rel=0.1)
    assert [request.arrival_s for request in trace] == sorted(request.arrival_s for request in trace)
    prompts = [request.prompt_tokens for request in trace]
    outputs = [request.output_tokens for request in trace]
    assert 16 <= min(prompts) < 20
    assert 950 < max(prompts) <= 1024
    assert statistics.median(prompts) == pytest.approx(128, rel=0.1)  # the geometric mean of 16 and 1024
    assert statistics.median(outputs) == pytest.approx(50, rel=0.05)
    assert max(outputs) <= 400
    assert statistics.stdev(map(math.log, outputs)) == pytest.approx(0.5, rel=0.05)
    rng = random.Random(4)
    assert Counter(Lengths(1, 2).draw(rng) for _ in range(1000))[2] == pytest.approx(1000 * math.log(1.5, 3), rel=0.1)


def test_the_seed_decides_the_trace() -> None:
    def trace(seed: int) -> list[TraceRequest]:
        return generate_trace(50, 1.0, Lengths(5, 9), Lengths(7, 7), num_prefixes=3, prefix_tokens=100, seed=seed)

    assert trace(1) == trace(1) != trace(2)
    assert {request.prefix for request in trace(1)} == {"prefix-0", "prefix-1", "prefix-2"}
    assert all(105 <= request.prompt_tokens <= 109 for request in trace(1))
    assert all(request.output_tokens == 7 for request in trace(1))


def test_without_a_rate_all_arrive_at_once() -> None:
    assert {request.arrival_s for request in generate_trace(5, None, Lengths(1, 1), Lengths(1, 1))} == {0.0}


@pytest.mark.parametrize(
    "text", ["", "x", "0", "3:2", "1.5", "1:2:3", "1:9:20:1", "1:9:4:-1", "1:9:4:10.1", "1:9:4:inf", "nan", "1e99"]
)
def test_lengths_that_are_none(text: str) -> None:
    with pytest.raises(RequestError, match="expected N, LOW:HIGH or LOW:HIGH:MEDIAN:SIGMA"):
        Lengths.parse(text)


def test_the_largest_sigma_can_be_drawn() -> None:
    lengths, rng = Lengths.parse("1:9:4:10"), random.Random(0)
    assert {lengths.draw(rng) for _ in range(1000)} == set(range(1, 10))


def test_lengths_are_parsed() -> None:
    assert Lengths.parse("7") == Lengths(7, 7)
    assert Lengths.parse("7:9") == Lengths(7, 9)
    assert Lengths.parse("7:900:50:0.5") == Lengths(7, 900, 50.0, 0.5)
