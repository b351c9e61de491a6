"""What is done with the files of a case, by target. Anything but success or a FastinferError of one line is a failure."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from fastinfer import LLM, BeamSearchParams, SamplingParams
from fastinfer.engine.adapters import Adapters
from fastinfer.errors import FastinferError
from fastinfer.models.hf_config import read_hf_config
from fastinfer.models.lora import AdapterSlots
from fastinfer.outputs import RequestOutput
from fastinfer.serving.jobs import beam_search_job, generation_job
from fastinfer.serving.prompt import prepare
from fastinfer.serving.sampling_defaults import sampling_defaults
from fastinfer.structured_output import StructuredOutputsParams
from fastinfer.tokenizers.tokenizer import Tokenizer
from support.tiny_decoder import CONFIG

Reader = Callable[[Path], None]

MAX_STEPS = 100
LIMITS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 16,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "block_size": 16,
    "kv_cache_memory": 1 << 20,
    "enforce_eager": True,
}
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
    """Requests of a model that has been loaded must not fail."""
    for completion in output.outputs:
        assert completion.finish_reason != "error", completion.stop_reason


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


def parameters_reader(gguf: Path) -> Reader:
    """Make the reader of requests to a small model."""
    engine = LLM(str(gguf), **LIMITS).engine

    def read(folder: Path) -> None:
        fields = json.loads((folder / "request.json").read_bytes())
        sampling = fields.get("sampling", {})
        if isinstance(bias := sampling.get("logit_bias"), dict):
            sampling["logit_bias"] = {int(key) if key.isdecimal() else key: value for key, value in bias.items()}
        if "structured" in fields:
            sampling["structured_outputs"] = StructuredOutputsParams(**fields["structured"])
        prepared = prepare(engine, fields["prompt"])
        options = fields.get("request", {})
        if "beams" in fields:
            add = beam_search_job(engine, prepared, BeamSearchParams(**fields["beams"]))
        else:
            add = generation_job(engine, prepared, SamplingParams(**sampling), **options)
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
    "parameters": lambda seed: parameters_reader(seed / "model.gguf"),
}
