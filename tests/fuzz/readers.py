"""What each target does with the files of a case. Only success and a FastinferError of one line are no failure."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from support.tiny_decoder import CONFIG

from fastinfer import LLM, BeamSearchParams, SamplingParams
from fastinfer.engine.adapters import Adapters
from fastinfer.errors import FastinferError, RequestError
from fastinfer.formats.json_fields import JsonFields
from fastinfer.models.hf_config import read_hf_config
from fastinfer.models.lora import AdapterSlots
from fastinfer.outputs import RequestOutput
from fastinfer.serving.jobs import beam_search_job, generation_job
from fastinfer.serving.prompt import prepare
from fastinfer.serving.sampling_defaults import sampling_defaults
from fastinfer.structured_output import StructuredOutputsParams
from fastinfer.tokenizers.tokenizer import Tokenizer

Reader = Callable[[Path], None]

MAX_STEPS = 100
DIGITS = {str(token) for token in range(1000)}
OPTIONS = ("priority", "timeout", "queue_timeout", "request_id", "adapter")
LIMITS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 16,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "block_size": 16,
    "kv_cache_memory": 1 << 20,
    "enforce_eager": True,
}
OTHER_ERROR = re.compile(r"\w+(Error|Exception): ")  # see fastinfer.errors.describe_error
TEXTS = ("the quick  brown\nfox", "", "ab<s>▁</s><think>", "日本 \0\ud7ff👍🏽", "a" * 300)


def attempt(*steps: Callable[[], object]) -> None:
    """Do all steps, even if one of them refuses; then raise the first refusal."""
    refusals = []
    for step in steps:
        try:
            step()
        except FastinferError as error:
            refusals.append(error)
    if refusals:
        raise refusals[0]


def check(output: RequestOutput) -> None:
    """A request may end with a message of the project's own, or because the weights are no numbers."""
    for completion in output.outputs:
        if completion.finish_reason == "error":
            message = str(completion.stop_reason)
            assert not OTHER_ERROR.match(message) or "must have a number in every logit" in message, message


def read_model(path: Path) -> None:
    """Load a model and let it write two tokens."""
    llm = LLM(str(path), **LIMITS)
    for output in llm.generate({"prompt_token_ids": [0, 1, 2]}, SamplingParams(temperature=0, max_tokens=2)):
        check(output)


def read_config(folder: Path) -> None:
    """Read the sizes of a model, and the default parameters of requests."""
    checkpoint: Any = SimpleNamespace(path=folder)
    attempt(lambda: read_hf_config(folder / "config.json"), lambda: sampling_defaults(checkpoint))


def read_tokenizer(folder: Path) -> None:
    """Read a tokenizer, and turn texts into tokens and back."""
    tokenizer = Tokenizer.from_folder(folder)
    attempt(*(lambda text=text: tokenizer.decode(tokenizer.encode(text)) for text in TEXTS))
    tokenizer.decode(list(range(min(tokenizer.vocab_size, 500))))


def read_adapter(folder: Path) -> None:
    """Read an adapter and load it into a model's slots."""
    adapters = Adapters(AdapterSlots(CONFIG, 1, 8, torch.float32))
    adapters.load("name", folder)
    adapters.place(adapters.key("name"), set())


def known(request: JsonFields, key: str, kind: Any) -> dict[str, Any]:
    """Return the arguments for a dataclass that a request has; Python itself refuses other names."""
    given = request.object(key)
    names = {field.name for field in dataclasses.fields(kind)}
    return {} if given is None else {name: value for name, value in given.values.items() if name in names}


def parameters_reader(gguf: Path) -> Reader:
    """Make the reader of requests to a small model."""
    engine = LLM(str(gguf), **LIMITS).engine

    def read(folder: Path) -> None:
        request = JsonFields.read(folder / "request.json", RequestError)
        sampling = known(request, "sampling", SamplingParams)
        if isinstance(bias := sampling.get("logit_bias"), dict):
            sampling["logit_bias"] = {int(key) if key in DIGITS else key: value for key, value in bias.items()}
        if "structured" in request.values:
            structured = known(request, "structured", StructuredOutputsParams)
            sampling["structured_outputs"] = StructuredOutputsParams(**structured)
        prepared = prepare(engine, request.values.get("prompt", ""))
        if "beams" in request.values:
            beams = known(request, "beams", BeamSearchParams)
            beams.setdefault("beam_width", 2)
            add = beam_search_job(engine, prepared, BeamSearchParams(**beams))
        else:
            options = request.object("request")
            given = {name: options.values[name] for name in OPTIONS if name in options.values} if options else {}
            add = generation_job(engine, prepared, SamplingParams(**sampling), **given)
        request_id = add()
        try:
            for _ in range(MAX_STEPS):
                for output in engine.step():
                    assert isinstance(output, RequestOutput)
                    check(output)
                if not engine.has_unfinished:
                    return
            raise AssertionError(f"not finished after {MAX_STEPS} steps")
        finally:
            engine.abort(request_id)

    return read


READERS: dict[str, Callable[[Path], Reader]] = {
    "gguf": lambda _: lambda folder: read_model(folder / "model.gguf"),
    "safetensors": lambda _: read_model,
    "config": lambda _: read_config,
    "tokenizer": lambda _: read_tokenizer,
    "peft": lambda _: read_adapter,
    "parameters": lambda model: parameters_reader(model / "model.gguf"),
}
