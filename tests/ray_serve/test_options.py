"""Options of `fastinfer serve` as arguments of an application."""

from typing import Any

import pytest

from fastinfer.errors import FastinferError
from fastinfer.ray_serve.options import OF_RAY, num_gpus, parse_options


def test_options_are_those_of_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTINFER_API_KEY", "a, b,")
    options = parse_options(
        {"model": "smollm2-135m-instruct", "max_num_seqs": 3, "kv-cache-dtype": "int8", "served-model-name": ["x", "y"]}
        | {"deterministic": True, "threads": 1, "beta": "0.5"}
    )
    assert options.engine_options == {"max_num_seqs": 3, "kv_cache_dtype": "int8", "deterministic": True}
    assert (options.served_model_name, options.threads, options.beta) == (["x", "y"], 1, 0.5)
    assert options.api_key == ["a", "b"]
    assert parse_options({}).beta == 1.0


def test_a_variable_of_spaces_does_not_leave_the_server_without_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTINFER_API_KEY", " ")
    with pytest.raises(FastinferError, match="--api-key: expected printable ASCII characters"):
        parse_options({})


def test_options_without_a_value() -> None:
    for value in (True, "true", "True"):
        assert parse_options({"deterministic": value}).engine_options == {"deterministic": True}
    for value in (False, "false"):
        assert parse_options({"deterministic": value}).engine_options == {}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"data_parallel_size": 2}, "data_parallel_size: expected an option of the engine, got one that belongs to"),
        ({"api_key": ["a", "b "]}, "--api-key: expected printable ASCII characters without spaces at the ends"),
        ({"beta": -1}, "beta: expected a number above 0, got '-1'"),
        ({"threads": 0}, "--threads: expected an integer in 1..1024, got '0'"),
        ({"contxt": 5}, "contxt: expected an option of 'fastinfer serve', got an unknown one"),
        ({"hos": "0.0.0.0"}, "hos: expected an option of 'fastinfer serve', got an unknown one"),
        ({"data-parallel-siz": 2}, "data-parallel-siz: expected an option of 'fastinfer serve'"),
        ({"help": True}, "help: expected an option of 'fastinfer serve', got an unknown one"),
        ({5: 1}, "args: expected names of options as texts, got 5"),
        ({"deterministic": "no"}, "deterministic: expected true or false, got 'no'"),
        ({"model": "no-such-model"}, "no-such-model"),
    ],
)
def test_wrong_options(args: dict[str, Any], message: str) -> None:
    with pytest.raises(FastinferError, match=message):
        parse_options(args)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({}, 0),
        ({"device": "auto"}, 0),
        ({"device": "cpu", "tensor_parallel_size": 2}, 0),
        ({"device": "cuda"}, 1),
        ({"device": "cuda:0"}, 1),
        ({"device": "cuda:2"}, 3),
        ({"device": "cuda+cpu"}, 1),
        ({"device": "cuda:0=24,cuda:1=8"}, 2),
        ({"device": "cpu,cuda:1+cuda:3"}, 4),
        ({"device": "cuda", "tensor_parallel_size": 4}, 4),
        ({"device": "cuda:1", "tensor_parallel_size": 2}, 3),
    ],
)
def test_gpus_of_a_replica(args: dict[str, Any], expected: int) -> None:
    assert num_gpus(parse_options(args).engine_options) == expected


def test_options_of_ray_exist() -> None:
    """A name that is misspelt here would be refused as unknown, not as one of Ray's."""
    defaults = vars(parse_options({}))
    assert {name.replace("-", "_") for name in OF_RAY} <= set(defaults)
