"""Sampling parameters that a checkpoint recommends."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.families import save_model

from fastinfer import LLM, AsyncEngine, SamplingParams, llm
from fastinfer.errors import CheckpointFormatError
from fastinfer.formats.gguf import GGUFFile
from fastinfer.models.gguf_checkpoint import GGUFCheckpoint
from fastinfer.models.hf_checkpoint import HFCheckpoint
from fastinfer.serving.sampling_defaults import sampling_defaults

OWN = SamplingParams(temperature=0.7, top_p=0.95)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_model(path, "llama2")
    return path


def defaults_with(folder: Path, generation_config: dict[str, Any]) -> SamplingParams:
    (folder / "generation_config.json").write_text(json.dumps(generation_config))
    return sampling_defaults(HFCheckpoint(folder))


@pytest.mark.parametrize(
    ("generation_config", "expected"),
    [
        ({"temperature": 0.6, "top_p": 0.9, "do_sample": True}, SamplingParams(temperature=0.6, top_p=0.9)),
        ({"top_k": 20}, SamplingParams(top_k=20)),
        ({"min_p": 0.05, "repetition_penalty": 1.05}, SamplingParams(min_p=0.05, repetition_penalty=1.05)),
        ({"temperature": None, "eos_token_id": [1, 2], "max_new_tokens": 7}, OWN),
        ({}, OWN),
    ],
)
def test_generation_config(folder: Path, generation_config: dict[str, Any], expected: SamplingParams) -> None:
    assert defaults_with(folder, generation_config) == expected


def test_no_generation_config(folder: Path) -> None:
    (folder / "generation_config.json").unlink(missing_ok=True)
    assert sampling_defaults(HFCheckpoint(folder)) == OWN


@pytest.mark.parametrize(
    ("generation_config", "message"),
    [
        ({"temperature": "hot"}, "generation_config.json: temperature must be a number"),
        ({"top_p": 1.5}, "generation_config.json: top_p must be"),
        ({"top_k": 1.5}, "generation_config.json: top_k must be an integer"),
    ],
)
def test_wrong_values_name_the_file_and_the_field(
    folder: Path, generation_config: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointFormatError, match=message):
        defaults_with(folder, generation_config)


def test_gguf(model_path: Path) -> None:
    checkpoint = GGUFCheckpoint(GGUFFile(model_path))
    assert sampling_defaults(checkpoint) == OWN
    keys = {"temp": float(np.float32(0.6)), "top_p": float(np.float32(0.95)), "top_k": 64, "mirostat": 2}
    checkpoint.file.metadata.update({f"general.sampling.{name}": value for name, value in keys.items()})
    assert sampling_defaults(checkpoint) == SamplingParams(temperature=0.6, top_p=0.95, top_k=64)
    checkpoint.file.metadata["general.sampling.temp"] = float("nan")
    with pytest.raises(CheckpointFormatError, match=rf"{model_path.name}: temperature must be"):
        sampling_defaults(checkpoint)


def test_requests_without_parameters_use_them(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    three = SamplingParams(temperature=0.0, max_tokens=3)
    monkeypatch.setattr(llm, "sampling_defaults", lambda checkpoint: three)
    loaded = LLM(str(model_path), max_model_len=64)
    assert loaded.default_params == three
    [expected] = loaded.generate("The capital of France is", replace(three, max_tokens=3))
    [output] = loaded.generate("The capital of France is")
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    assert len(output.outputs[0].token_ids) == 3
    [output] = loaded.generate("The capital of France is", SamplingParams(temperature=0.0, max_tokens=5))
    assert len(output.outputs[0].token_ids) == 5, "explicit parameters win"

    async def last() -> list[int]:
        async with AsyncEngine(loaded.engine) as engine:
            async for result in engine.generate("The capital of France is"):
                token_ids = result.outputs[0].token_ids
        return token_ids

    assert asyncio.run(last()) == expected.outputs[0].token_ids
