"""``fastinfer simulate`` as a command: its files, its output and its messages."""

import json
from pathlib import Path
from typing import Any

import pytest

from fastinfer.cli import simulate_arguments
from fastinfer.cli.main import main
from fastinfer.simulation import routing
from fastinfer.simulation.cost_file import CostFile

COSTS: dict[str, Any] = {
    "source": "assumed",
    "model": "a model",
    "seconds": {
        "step": 6e-3,
        "decode_sequence": 2e-5,
        "prompt_sequence": 1e-4,
        "prompt_token": 2e-5,
        "decode_context": 5e-8,
        "prompt_context": 0,
    },
    "engine": {
        "max_num_seqs": 16,
        "max_num_batched_tokens": 256,
        "max_model_len": 2048,
        "block_size": 32,
        "num_blocks": [600],
        "windows": [0],
    },
}

DEFAULTS = {"enable_prefix_caching": True, "separates_roles": False}


@pytest.fixture
def costs(tmp_path: Path) -> Path:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(COSTS))
    return path


def changed(path: Path, **changes: Any) -> str:
    """Write the costs with some values changed or, if ``None``, left out; ``engine_windows`` is one of ``engine``."""
    values: dict[str, Any] = json.loads(json.dumps(COSTS))
    for name, value in changes.items():
        group, _, key = name.partition("__")
        holder, key = (values[group], key) if key else (values, group)
        holder[key] = value
    path.write_text(json.dumps(values))
    return str(path)


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["simulate", *arguments]) == 0
    return capsys.readouterr().out


def test_routings_are_those_of_the_simulation() -> None:
    assert simulate_arguments.ROUTINGS == routing.ROUTINGS


def test_a_generated_trace(costs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (str(costs), "--requests", "30", "--rate", "20", "--price", "2.5", "--replicas", "2")
    text = output(capsys, *arguments)
    assert text.startswith("a model, costs of steps: assumed\n30 requests on 2 replicas in ")
    assert " per million output tokens\nms" in text
    assert [line.split()[0] for line in text.splitlines()[-3:]] == ["queue", "TTFT", "TPOT"]
    assert output(capsys, *arguments) == text
    assert output(capsys, *arguments, "--seed", "1") != text


def test_json(costs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"arrival_s": 3, "prompt_tokens": 1, "output_tokens": 2}\n')
    [line] = output(capsys, str(costs), "--trace", str(trace), "--json", "--price", "3600").splitlines()
    result = json.loads(line)
    assert result["costs"] == COSTS | {"engine": COSTS["engine"] | DEFAULTS}
    assert {name: result[name] for name in ("routing", "beta", "rate", "seed", "price")} == {
        "routing": "prefix-affinity",
        "beta": 1.0,
        "rate": None,
        "seed": None,
        "price": 3600.0,
    }
    step = 6e-3 + 2e-5
    assert result["ttft_s"]["p99"] == pytest.approx(step + 5e-8)
    assert result["tpot_s"]["mean"] == pytest.approx(step + 2 * 5e-8)
    assert result["price_per_million"] == pytest.approx(result["seconds"] / 2 * 1e6)


def test_options_replace_the_limits_of_the_file(costs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--num-kv-blocks", "90", "--no-prefix-caching")
    result = json.loads(output(capsys, str(costs), "--requests", "5", "--json", *options))
    changes = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "num_blocks": [90], "enable_prefix_caching": False}
    assert result["costs"]["engine"] == COSTS["engine"] | DEFAULTS | changes


def test_json_says_how_the_trace_was_made(costs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--requests", "2", "--rate", "4", "--routing", "round-robin", "--json")
    result = json.loads(output(capsys, str(costs), *options))
    assert (result["rate"], result["seed"], result["beta"], result["price"]) == (4.0, 0, None, None)
    assert json.loads(output(capsys, str(costs), *options, "--seed", "7"))["seed"] == 7


def test_prefixes_are_found(costs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(costs), "--requests", "40", "--rate", "10", "--prompt-tokens", "10", "--json"]
    arguments += ["--prefixes", "1", "--prefix-tokens", "320"]
    assert json.loads(output(capsys, *arguments))["hit_rate"] > 0.9
    assert json.loads(output(capsys, *arguments, "--no-prefix-caching"))["hit_rate"] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("nowhere.json", "nowhere.json: No such file"),
        ("{costs} --trace nowhere", "nowhere': No such file"),
        ("{costs} --trace {costs}", "costs.json', line 1: expected arrival_s"),
        ("{costs} --trace {costs} --rate 3", "--trace: the file has the requests, so --rate has no effect"),
        ("{costs} --prefixes 3", "--prefixes and --prefix-tokens: expected both or neither"),
        ("{costs} --prompt-tokens 9:3", "--prompt-tokens: expected N, LOW:HIGH"),
        ("{costs} --prompt-tokens 2048", "max_model_len=2048 tokens together, got 2048 and"),
        ("{costs} --seed -1", "--seed: expected an integer of at least 0, got '-1'"),
        ("{costs} --output-tokens 1:9:4:11", "--output-tokens: expected N, LOW:HIGH"),
        ("{costs} --price 1e308", "--price must be a number in"),
        ("{costs} --beta -1", "--beta must be a number in"),
        ("{costs} --routing round-robin --beta 3", "--beta: expected --routing prefix-affinity with it, got"),
        ("{costs} --num-kv-blocks 3", "num_blocks must be at least [64]"),
        ("{costs} --replicas 0", "--replicas: expected an integer in 1..100000"),
        (
            "{costs} --num-kv-blocks 2000000000",
            "--replicas and --num-kv-blocks: expected at most 50000000 blocks in all, got 1 replicas with 2000000000",
        ),
        ("{costs} --replicas 90000", "expected at most 50000000 blocks in all, got 90000 replicas with 600 each"),
    ],
)
def test_mistakes(arguments: str, message: str, costs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *arguments.format(costs=costs).split()]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": "guessed"}, "source: expected measured or assumed, got 'guessed'"),
        ({"seconds": None}, "seconds is missing"),
        ({"seconds__prompt_token": -1.0}, "seconds.prompt_token: expected 0.0 to 1000000.0, got -1.0"),
        ({"seconds__prompt_context": 1e308}, "seconds.prompt_context: expected 0.0 to 1000000.0, got 1e+308"),
        ({"seconds__decode_tokens": 1.0}, "seconds: expected step, decode_sequence, "),
        ({"engine__enable_prefix_cache": False}, "engine: expected max_num_seqs, "),
        ({"engines": {}}, "costs.json: expected date, machine, fit, source, model, seconds, engine, got 'engines'"),
        ({"seconds__prompt_token": "x"}, "seconds.prompt_token: expected float"),
        ({"seconds__step": 1e-300, "seconds__decode_sequence": 0}, "steps of at least 1e-06 s, got some of 1e-300 s"),
        ({"engine__block_size": 0}, "engine.block_size: expected 1 to"),
        ({"engine__num_blocks": []}, "engine.num_blocks: expected a list of integers, got an empty one"),
        ({"engine__num_blocks": ["x"]}, "engine.num_blocks must be an integer in"),
        ({"engine__windows": [0, 512]}, "expected as many windows as num_blocks, got 2"),
    ],
)
def test_files_of_costs_that_are_none(
    changes: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", changed(tmp_path / "costs.json", **changes)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert message in line


def test_groups_of_layers_have_blocks_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = changed(tmp_path / "costs.json", engine__num_blocks=[600, 300], engine__windows=[0, 128])
    assert "5 requests" in output(capsys, path, "--requests", "5")
    assert main(["simulate", path, "--num-kv-blocks", "600"]) == 2
    assert "expected a model with one group of layers, got one with 2" in capsys.readouterr().err


def test_what_is_written_is_read(tmp_path: Path, costs: Path) -> None:
    file = CostFile.read(costs)
    copy = tmp_path / "copy.json"
    copy.write_text(json.dumps({"date": "today", "fit": {}, **file.as_dict()}))
    assert CostFile.read(copy) == file
