"""Arguments of wrong types and sizes end in one of the project's errors, which names the argument."""

import dataclasses
import re
import subprocess
import sys
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.peft_adapter import write_adapter
from support.tiny_folder import write_tiny_folder

from fastinfer import LLM, BeamSearchParams, SamplingParams, StructuredOutputsParams, generate
from fastinfer.engine.config import EngineConfig
from fastinfer.errors import FastinferError, RequestError
from fastinfer.utils.memory_errors import explained_memory_errors, is_memory_error

BIG = 10**5000  # too long for Python to print
WRONG: list[Any] = [
    None, 1, -1, 2**63, BIG, -BIG, True, 1.5, float("nan"), b"bytes", "", "x" * 5000, "\udcff", "a\0b", ["x"], [BIG],
    [None], [[1]], (1, 2), ("a", BIG), {}, {BIG: 1}, {1: BIG}, {BIG}, {"prompt": BIG}, {"prompt_token_ids": [BIG]},
    {"prompt": "a", "pinned_prompt": []}, {"prompt": "a", "cache_salt": BIG}, object(),
]  # fmt: skip
ONE = SamplingParams(max_tokens=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("model") / "tiny", "llama2")


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), max_model_len=64, max_num_seqs=4, device="cpu", max_loras=1)


def check(function: Callable[[Any], object], values: list[Any] = WRONG) -> None:
    """Call a function with each value: it takes it, or raises one of the project's errors, in one line."""
    for value in values:
        message = "none"
        try:
            function(value)
        except FastinferError as error:
            message = str(error)
        assert 0 < len(message) <= 1000
        assert message.isprintable()


def refused(function: Callable[[Any], object], match: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(FastinferError, match=match):
            function(value)


NO_TEXT = [value for value in WRONG if not isinstance(value, str)]


@pytest.mark.parametrize("name", ["model", "draft_model"])
def test_names_of_models(name: str, folder: Path) -> None:
    def load(value: Any) -> LLM:
        return LLM(**{"model": str(folder), "max_model_len": 64, "device": "cpu", name: value})

    values = [value for value in NO_TEXT if value is not None or name == "model"]
    refused(load, "model must be a string or a path, got", values)
    refused(load, "model", [value for value in WRONG if isinstance(value, str)])


def test_the_model_of_generate() -> None:
    refused(lambda value: generate("a", model=value), "model must be a string or a path, got", NO_TEXT)


@pytest.mark.parametrize(
    ("name", "choices"), [("device", "auto, cpu, cuda or cuda:N"), ("dtype", "one of"), ("kv_cache_dtype", "one of")]
)
def test_options_of_several_choices(name: str, choices: str, folder: Path) -> None:
    refused(lambda value: LLM(str(folder), **{name: value}), f"{name} must be {choices}.*, got", WRONG)


@pytest.mark.parametrize(
    "name", [field.name for field in dataclasses.fields(EngineConfig) if field.type in (int, float, bool, int | None)]
)
def test_numbers_of_the_engine(name: str) -> None:
    values = [v for v in WRONG if v is not None and (not isinstance(v, int | float) or abs(v) > 2**62)]
    refused(lambda value: EngineConfig(**{name: value}), f"{name} must be", values)


@pytest.mark.parametrize("kind", [SamplingParams, BeamSearchParams, StructuredOutputsParams])
def test_parameters(kind: type[Any], llm: LLM) -> None:
    given: dict[str, Any] = {
        SamplingParams: {"max_tokens": 1},
        BeamSearchParams: {"beam_width": 1, "max_tokens": 1},
    }.get(kind, {})
    run = {SamplingParams: llm.generate, BeamSearchParams: llm.beam_search}.get(kind, lambda prompt, params: None)
    for field in dataclasses.fields(kind):
        check(lambda value, name=field.name: run("a", kind(**(given | {name: value}))))
    assert not llm.engine.has_unfinished


def test_prompts(llm: LLM) -> None:
    calls: list[Callable[[Any], object]] = [
        lambda value: llm.generate(value, ONE),
        lambda value: list(llm.stream(value, ONE)),
        lambda value: llm.chat(value, ONE),
        lambda value: llm.score(value),
        lambda value: llm.embed(value),
        lambda value: llm.generate("a", value),
        lambda value: llm.generate("a", ONE, priority=value),
        lambda value: llm.embed("a", pooling=value),
    ]
    for call in calls:
        check(call)
    keys = [value for value in (*NO_TEXT, (BIG,)) if isinstance(value, Hashable)]
    match = r"messages\[0\]: expected keys that are strings, got"
    refused(lambda key: llm.chat([{"role": "user", "content": "x", key: 1}]), match, keys)
    assert not llm.engine.has_unfinished
    assert llm.engine.block_manager.num_used == 0


def test_variables_of_a_template(llm: LLM) -> None:
    no_dicts = [value for value in WRONG if value is not None and not isinstance(value, dict)]
    for chat in (llm.chat, llm.stream_chat):

        def ask(value: Any, chat: Callable[..., object] = chat) -> None:
            chat([{"role": "user", "content": "x"}], ONE, template_variables=value)

        refused(ask, "template_variables must be a dict, got", no_dicts)
        refused(ask, "template_variables must have names that are strings, got", [{1: 1}, {BIG: 1}, {None: 1}])
        for name in ("messages", "engine", "template", "eos_token"):
            refused(ask, f"template_variables must not have {name}", [{name: []}])


def test_requests_of_the_engine(llm: LLM) -> None:
    engine = llm.engine

    def add(**options: Any) -> None:
        engine.abort(engine.add_request(**({"prompt_token_ids": [5], "params": ONE} | options)))

    for name in ("prompt_token_ids", "params", "priority", "adapter", "timeout", "queue_timeout"):
        check(lambda value, name=name: add(**{name: value}))
    given = [value for value in NO_TEXT if value is not None]
    refused(lambda value: add(request_id=value), "request_id must be a string, got", given)
    refused(lambda value: add(cache_salt=value), "cache_salt must be a string, got", NO_TEXT)
    assert not engine.has_unfinished


def test_adapters_and_modules(llm: LLM, tmp_path: Path) -> None:
    write_adapter(tmp_path, llm.engine.model.config)
    refused(lambda value: llm.load_adapter(value, tmp_path), "adapter name must be a string, got", NO_TEXT)
    refused(lambda value: llm.load_adapter("name", value), "path must be a string or a path, got", NO_TEXT)
    refused(lambda value: llm.engine.load_adapter("name", value), "adapter must be a string or a path", NO_TEXT)
    refused(lambda value: llm.unload_adapter(value), "adapter must be", WRONG)
    for load in (LLM, lambda value: llm.load_adapter("name", value)):
        with pytest.raises(FastinferError, match=r"expected a .*folder") as caught:
            load("a" * 100_000)
        assert len(str(caught.value)) < 400
    names = [value for value in NO_TEXT if value is not None and not isinstance(value, list)]
    refused(lambda value: llm.generate("a", ONE, adapter=value), "adapter must be a string, got", names)
    refused(lambda value: llm.pin_prompt(value, "a"), "name must be a string, got", NO_TEXT)
    refused(lambda value: llm.unpin_prompt(value), "pinned prompt must be", WRONG)
    assert llm.engine.adapters.names == []
    llm.load_adapter("name", tmp_path)
    llm.unload_adapter("name")


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens"])
def test_as_many_as_an_integer_can_say(name: str, folder: Path) -> None:
    """2^31 - 1 sequences need more memory than any machine has; the error says what needs it."""
    pattern = rf"memory is exhausted: tiny needs \d+ bytes for its weights.* {name}=2147483647.*; change max_num_seqs"
    limit = "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))"
    done = run(f"{limit}; load(kv_cache_memory=1 << 24, {name}=2**31 - 1)", folder)
    assert done.returncode == 0, done.stderr
    assert re.search(pattern, done.stdout), done.stdout


MEMORY = """
import sys
from fastinfer import LLM
from fastinfer.errors import FastinferError

def load(**options):
    try:
        LLM(sys.argv[1], max_model_len=64, device="cpu", **options)
    except FastinferError as error:
        print(error)
    else:
        print("loaded")

def limit(more):
    import resource
    pages = int(open("/proc/self/statm").read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more,) * 2)

"""


def run(code: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", MEMORY + code, str(folder)], capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("options", ["kv_cache_memory=400 << 20", "max_num_batched_tokens=1 << 24"])
def test_no_memory_for_cache_or_steps(options: str, folder: Path) -> None:
    done = run(f"load(); limit(300 << 20); load({options})", folder)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == "loaded"
    assert second.startswith("memory is exhausted: tiny needs ")
    for text in ("bytes for its weights", "bytes for the KV cache", "max_model_len (--context)", "kv_cache_memory"):
        assert text in second


def test_no_memory_for_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastinfer.models.layer_reader.make_weight", lambda *args: torch.empty(1 << 50))
    pattern = r"memory is exhausted: tiny needs \d+ bytes for its weights, .*; change .* \(.*4503599627370496 bytes"
    with pytest.raises(RequestError, match=pattern):
        LLM(str(folder), max_model_len=64, device="cpu")


def test_no_room_to_map_a_file(folder: Path) -> None:
    code = "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 20, 1 << 20)); load()"
    done = run(f"load(); {code}", folder)
    assert done.returncode == 0, done.stderr
    assert "model.safetensors: cannot be mapped into memory: " in done.stdout


def test_kinds_of_memory_errors() -> None:
    errors = [
        MemoryError(),
        OSError(12, "Cannot allocate memory"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."),
        RuntimeError("std::bad_alloc"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    ]
    others = [RuntimeError("shapes differ"), OSError(2, "No such file"), ValueError("out of memory")]
    assert all(map(is_memory_error, errors))
    assert not any(map(is_memory_error, others))
    for error in errors:
        with (
            pytest.raises(RequestError, match="memory is exhausted: it needs 5 bytes; change a or b"),
            explained_memory_errors("it needs 5 bytes", "a or b"),
        ):
            raise error
    for other in others:
        with pytest.raises(type(other)) as caught, explained_memory_errors("it", "a"):
            raise other
        assert caught.value is other
