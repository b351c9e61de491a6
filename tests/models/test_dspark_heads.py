"""DSpark heads: DFlash heads whose logits depend on the draft before, and which draft after the newest token."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.dflash_heads import (
    BLOCK_SIZE,
    DRAFT_VOCAB,
    MARKOV,
    MASK,
    RANK,
    random_head,
    write_deepspec,
    write_gguf_head,
    write_own,
    write_speculators,
)
from support.draft_blocks import FULL, LAYERS, SLIDING, check_blocks, recorded_blocks, with_head
from support.drafts import GREEDY, OPTIONS, recorded_drafts, texts
from support.eagle_heads import VOCAB_SIZE
from support.tiny_folder import write_tiny_folder
from torch import Tensor

from fastinfer import LLM, SamplingParams
from fastinfer.errors import CheckpointFormatError, FastinferError, GGUFFormatError, UnsupportedModelError
from fastinfer.models.draft_chain import MarkovBias
from fastinfer.structured_output import StructuredOutputsParams
from fastinfer.weights.weight import DenseWeight

REDUCED = {"draft_vocab_size": DRAFT_VOCAB}
Write = Callable[..., Path]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("model") / "model", sizes={"num_hidden_layers": 5})


def markov_head(**settings: Any) -> dict[str, Tensor]:
    return random_head(len(LAYERS), **MARKOV, **settings)


def write_specforge(folder: Path, head: dict[str, Tensor], layers: list[int], **settings: Any) -> Path:
    """Write a folder as SpecForge does, with most settings in two places."""
    inner = {"mask_token_id": MASK, "target_layer_ids": layers, "projector_type": "dspark"}
    config = {"architectures": ["DSparkDraftModel"], "projector_type": "dspark", "dflash_config": inner}
    return write_own(folder, head, layers, **config | settings)


def test_a_bias_follows_from_the_token_before() -> None:
    generator = torch.Generator().manual_seed(5)
    first, second = torch.randn(30, 4, generator=generator), torch.randn(20, 4, generator=generator)
    logits = torch.randn(2, 20, generator=generator)
    found = MarkovBias(DenseWeight(first), DenseWeight(second))(logits, torch.zeros(2, 8), torch.tensor([29, 3]))
    torch.testing.assert_close(found, logits + first[[29, 3]] @ second.T)


@pytest.mark.parametrize(
    ("write", "settings", "expected"),
    [
        (write_deepspec, {}, {"drafts_next": True}),
        (write_deepspec, {"sample_from_anchor": False}, {}),
        (write_specforge, {}, {"drafts_next": True}),
        (write_specforge, {"sample_from_anchor": False}, {}),
        (write_speculators, {"sample_from_anchor": True, **REDUCED}, {"drafts_next": True}),
        (write_speculators, {"sample_from_anchor": None}, {}),
        (
            write_speculators,
            {"sample_from_anchor": True, "layer_types": [FULL, SLIDING], "sliding_window": 7},
            {"drafts_next": True, "windows": (0, 7), "whole_windows": True},
        ),
        (write_gguf_head, REDUCED, {"drafts_next": True}),
        (write_gguf_head, {"sample_from_anchor": False}, {}),
    ],
)
def test_drafts_are_those_of_the_reference(
    model: Path, tmp_path: Path, write: Write, settings: dict[str, Any], expected: dict[str, Any]
) -> None:
    head = markov_head(**{name: size for name, size in settings.items() if name in REDUCED})
    llm = with_head(model, write(tmp_path / "head", head, LAYERS, **MARKOV, **settings))
    blocks = recorded_blocks(llm)
    assert texts(llm, GREEDY) == texts(LLM(str(model), **OPTIONS), GREEDY)
    assert llm.engine.stats().num_failed_graphs == 0
    check_blocks(blocks, model, head, **expected)


@pytest.mark.parametrize(("write", "settings"), [(write_own, {}), (write_deepspec, {"markov_rank": 0})])
def test_drafts_after_the_newest_token_without_a_bias(
    model: Path, tmp_path: Path, write: Write, settings: dict[str, Any]
) -> None:
    head = random_head(len(LAYERS))
    llm = with_head(model, write(tmp_path / "head", head, LAYERS, sample_from_anchor=True, **settings))
    blocks = recorded_blocks(llm)
    texts(llm, GREEDY)
    check_blocks(blocks, model, head, drafts_next=True)


def test_a_block_gives_as_many_drafts_as_it_has_tokens(model: Path, tmp_path: Path) -> None:
    head = write_deepspec(tmp_path / "head", markov_head(), LAYERS, **MARKOV)
    llm = with_head(model, head, num_speculative_tokens=9)
    drafts = recorded_drafts(llm)
    texts(llm, GREEDY)
    assert max(num_before for _, num_before, _ in drafts) == BLOCK_SIZE - 1


@pytest.mark.parametrize(
    ("params", "options"),
    [
        (replace(GREEDY, structured_outputs=StructuredOutputsParams(regex="[^a]{30,}")), {}),
        (replace(GREEDY, temperature=1.5, seed=1, repetition_penalty=1.2, logprobs=2), {"dtype": "auto"}),
        (replace(GREEDY, temperature=0.7, seed=2), {"kv_cache_dtype": "int8", "dtype": "bfloat16"}),
        (replace(GREEDY, temperature=1.0, seed=4, n=3), {"kv_cache_memory": 225_000}),
        (GREEDY, {"tensor_parallel_size": 2}),
        (GREEDY, {"device": "cpu=2,cpu=3"}),
    ],
)
def test_no_option_changes_a_text(model: Path, tmp_path: Path, params: SamplingParams, options: dict[str, Any]) -> None:
    settings = {**MARKOV, **REDUCED, "sample_from_anchor": True}
    head = write_speculators(tmp_path / "head", markov_head(**REDUCED), LAYERS, **settings)
    llm = with_head(model, head, **options)
    found, stats = texts(llm, params), llm.engine.stats()
    assert found == texts(LLM(str(model), **OPTIONS | options | {"tensor_parallel_size": 1}), params)
    assert stats.num_drafted_tokens > 20
    assert stats.num_failed_draws == stats.num_failed_graphs == 0


@pytest.mark.parametrize(
    ("write", "settings", "damage", "error", "message"),
    [
        (write_deepspec, {"markov_head_type": "rnn"}, {}, UnsupportedModelError, "must be 'vanilla', got 'rnn'"),
        (write_deepspec, {"logit_scale": 2.0}, {}, UnsupportedModelError, "logit_scale must be 1.0, got 2.0"),
        (write_deepspec, {"markov_rank": None}, {}, CheckpointFormatError, "markov_rank is missing"),
        (
            write_specforge,
            {"projector_type": "domino", "dflash_config": {"target_layer_ids": LAYERS, "mask_token_id": MASK}},
            {},
            UnsupportedModelError,
            "projector_type must be 'dspark', got 'domino'",
        ),
        (
            write_deepspec,
            {},
            {"markov_head.markov_w2.weight": torch.ones(DRAFT_VOCAB, RANK)},
            CheckpointFormatError,
            r"markov_w2 must have the shape \[320, 24\], got \[101, 24\]",
        ),
        (
            write_gguf_head,
            {},
            {"markov_head.markov_w2.weight": torch.ones(VOCAB_SIZE, 3)},
            GGUFFormatError,
            r"'markov_w2.weight' must have the shape \(320, 24\), got \(320, 3\)",
        ),
    ],
)
def test_wrong_heads_are_refused(
    model: Path,
    tmp_path: Path,
    write: Write,
    settings: dict[str, Any],
    damage: dict[str, Tensor],
    error: type[FastinferError],
    message: str,
) -> None:
    folder = write(tmp_path / "head", markov_head() | damage, LAYERS, **MARKOV | settings)
    with pytest.raises(error, match=message):
        with_head(model, folder)
