"""Folders of models with linear attention, short convolutions or Mamba-2: what people do with them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.tiny_folder import write_tiny_folder

from fastinfer import LLM, SamplingParams
from fastinfer.cli import memory_bounds, memory_description
from fastinfer.errors import RequestError
from fastinfer.evaluation.perplexity import log_probabilities
from fastinfer.models.hf_checkpoint import HFCheckpoint

PROMPTS = [[(11 * i + 7 * j) % 256 for j in range(length)] for i, length in enumerate((1, 5, 40, 77))]
PARAMS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module", params=["qwen3.5", "olmo-hybrid", "lfm2", "lfm3", "granite-hybrid-dense", "falcon-h1"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("models") / "tiny", request.param)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    return texts_of_transformers(folder)


def texts_of_transformers(folder: Path) -> list[list[int]]:
    """Generate with transformers and its own cache of states."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    texts = []
    for prompt in PROMPTS:
        options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        texts.append(model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist())
    return texts


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 9}, {"num_speculative_tokens": 3}])
def test_texts_are_those_of_transformers(options: dict[str, Any], folder: Path, expected: list[list[int]]) -> None:
    llm = LLM(str(folder), dtype="float32", **options)
    for _ in range(2):
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], PARAMS)
        assert [output.outputs[0].token_ids for output in outputs] == expected
    assert llm.engine.stats().num_hit_tokens >= 32 + 64
    assert llm.engine.stats().num_failed_graphs == 0


@pytest.mark.parametrize("family", ["qwen3.5-moe", "qwen3-next"])
def test_mixtures_of_experts(family: str, tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "tiny", family)
    options = {"max_num_batched_tokens": 9, "num_speculative_tokens": 3}
    test_texts_are_those_of_transformers(options, folder, texts_of_transformers(folder))


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float16"])
def test_other_dtypes(dtype: str, folder: Path) -> None:
    llm = LLM(str(folder), dtype=dtype)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], PARAMS)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [24] * len(PROMPTS)


def test_perplexity_of_a_batch(folder: Path) -> None:
    model = LLM(str(folder), dtype="float32").engine.model
    one, two = (list(log_probabilities(model, PROMPTS, torch.float32, batch_size=size)) for size in (1, 3))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_memory(folder: Path) -> None:
    config = HFCheckpoint(folder).config
    states = {
        "Qwen3_5ForCausalLM": 6 * (3 * (2 * 2 * 16 + 6 * 48) * 4 + 6 * 16 * 48 * 4),
        "OlmoHybridForCausalLM": 4 * (3 * (2 * 2 * 32 + 6 * 48) * 4 + 6 * 32 * 48 * 4),
        "Lfm2ForCausalLM": 4 * 2 * 64 * 4,
        "Lfm3ForCausalLM": 5 * 6 * 64 * 4,
        "GraniteMoeHybridForCausalLM": 4 * (3 * (4 * 32 + 2 * 48) * 4 + 4 * 48 * 32 * 4),
        "FalconH1ForCausalLM": 3 * (3 * (6 * 16 + 2 * 2 * 48) * 4 + 6 * 48 * 16 * 4),
    }[config.architecture]
    assert memory_bounds.all_state_bytes(config) == states
    num_layers = config.state_layers.count(False)
    keys_and_values = num_layers * 64 * 2 * 2 * config.head_dim * 2
    # A sequence has a state and a snapshot.
    assert memory_bounds.kv_cache_bytes(config, 2, torch.float16, 33, 2) == 2 * (keys_and_values + 2 * states)
    assert memory_bounds.attended_positions(config, 4).total() == num_layers * 10
    rates = memory_bounds.Rates(1e9, 1e9, 1e9)
    described = memory_description.describe(str(folder), 64, 1, rates)
    assert described["weights_bytes"] > 0
    assert described["num_layers"] == json.loads((folder / "config.json").read_text())["num_hidden_layers"]


def test_what_is_not_supported(folder: Path) -> None:
    with pytest.raises(RequestError, match="the draft model must have full attention in all layers"):
        LLM(str(folder), draft_model=str(folder), num_speculative_tokens=2)
