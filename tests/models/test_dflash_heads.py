"""DFlash heads in the formats of others: their drafts are those of a reference, and change no text."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.dflash_heads import (
    BLOCK_SIZE,
    DRAFT_VOCAB,
    MASK,
    drafted_logits,
    random_head,
    write_gguf_head,
    write_own,
    write_speculators,
)
from support.draft_blocks import FULL, LAYERS, OPTION_CASES, SLIDING, with_head, write_flat_folder
from support.drafts import GREEDY, OPTIONS, check_adapter_and_sleep, recorded_drafts, texts
from support.eagle_heads import VOCAB_SIZE
from support.peft_adapter import write_adapter
from support.tiny_folder import write_tiny_folder
from torch import Tensor

from fastinfer import LLM, SamplingParams
from fastinfer.errors import CheckpointFormatError, FastinferError, GGUFFormatError, RequestError, UnsupportedModelError
from fastinfer.models.hf_config import read_hf_config
from fastinfer.structured_output import StructuredOutputsParams

Write = Callable[..., Path]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("model") / "model", sizes={"num_hidden_layers": 5})


@pytest.mark.parametrize(
    ("write", "num_layers", "settings"),
    [
        (write_own, 1, {}),
        (write_own, 3, {"layer_types": ["full_attention"] * 3}),
        (write_speculators, 2, {}),
        (write_speculators, 2, {"model_type": "llama", "draft_vocab_size": DRAFT_VOCAB}),
        (write_gguf_head, 2, {"draft_vocab_size": DRAFT_VOCAB}),
    ],
)
def test_drafts_are_those_of_the_reference(
    model: Path, tmp_path: Path, write: Write, num_layers: int, settings: dict[str, Any]
) -> None:
    head = random_head(len(LAYERS), num_layers, **settings)
    llm = with_head(model, write(tmp_path / "head", head, LAYERS, **settings))
    drafts = recorded_drafts(llm)
    assert texts(llm, GREEDY) == texts(LLM(str(model), **OPTIONS), GREEDY)
    check(drafts, model, head)


@pytest.mark.parametrize(
    ("write", "settings", "expected"),
    [
        (
            write_own,
            {"layer_types": [SLIDING, FULL], "sliding_window": 9, "use_sliding_window": True},
            {"windows": (9, 0)},
        ),
        (write_own, {"layer_types": [SLIDING, SLIDING], "sliding_window": 2}, {"windows": (2, 2)}),
        (
            write_own,
            {"layer_types": [FULL, SLIDING], "sliding_window": 9, "use_sliding_window": False},
            {"windows": (0, 1000)},  # nothing of the text is hidden, but the tokens behind are
        ),
        (write_own, {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 11}, {"windows": (0, 11)}),
        (write_own, {"use_sliding_window": True, "sliding_window": 11}, {}),  # from layer 28 on
        (
            write_own,
            {"is_causal": True, "layer_types": [FULL, SLIDING], "sliding_window": 13},
            {"windows": (0, 13), "is_causal": True},
        ),
        (
            write_own,
            {"is_causal": False, "layer_types": [FULL, SLIDING], "sliding_window": 8},
            {"windows": (0, 8), "whole_windows": True},
        ),
        (
            write_own,
            {"causal": False, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0},
            {"windows": (4, 4), "whole_windows": True},
        ),
        (
            write_own,
            {"use_swa": True, "swa_window_size": 6, "layer_types": [FULL, FULL], "sliding_window": 9},
            {"windows": (6, 6), "whole_windows": True},
        ),
        (
            write_own,
            {"use_swa": True, "use_sliding_window": False, "sliding_window": 6, "causal": True},
            {"windows": (6, 6), "is_causal": True},
        ),
        (
            write_own,
            {"use_swa": True, "swa_window_size": 6, "layer_types": [FULL, SLIDING], "sliding_window": 9},
            {"windows": (0, 6)},
        ),
        (
            write_speculators,
            {"layer_types": [FULL, SLIDING], "sliding_window": 7},
            {"windows": (0, 7), "whole_windows": True},
        ),
        (
            write_speculators,
            {"layer_types": [FULL, SLIDING], "sliding_window": 7, "sliding_window_non_causal": False},
            {"windows": (0, 7)},
        ),
        (
            write_speculators,
            {"model_type": "llama", "layer_types": [SLIDING, FULL], "sliding_window": 7}
            | {"sliding_window_non_causal": False},
            {"windows": (7, 0)},
        ),
        (
            write_gguf_head,
            {"sliding_window": 6, "sliding_window_pattern": [True, False]},
            {"windows": (6, 0)},
        ),
    ],
)
@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}])
def test_tokens_in_windows_see_what_they_were_trained_to_see(
    model: Path,
    tmp_path: Path,
    write: Write,
    settings: dict[str, Any],
    expected: dict[str, Any],
    options: dict[str, Any],
) -> None:
    head = random_head(len(LAYERS), model_type=settings.get("model_type", "qwen3"))
    llm = with_head(model, write(tmp_path / "head", head, LAYERS, **settings), **options)
    drafts = recorded_drafts(llm)
    assert texts(llm, GREEDY) == texts(LLM(str(model), **OPTIONS), GREEDY)
    assert llm.engine.stats().num_failed_graphs == 0
    check(drafts, model, head, **expected)


@pytest.mark.parametrize("write", [write_own, write_gguf_head])
def test_attention_may_have_sinks(model: Path, tmp_path: Path, write: Write) -> None:
    head = random_head(len(LAYERS), attention_sink_bias=True)
    inner = {"mask_token_id": MASK, "target_layer_ids": LAYERS, "attention_sink_bias": True}
    llm = with_head(model, write(tmp_path / "head", head, LAYERS, dflash_config=inner))
    drafts = recorded_drafts(llm)
    assert texts(llm, GREEDY) == texts(LLM(str(model), **OPTIONS), GREEDY)
    check(drafts, model, head)


def test_settings_may_be_beside_each_other_and_scale_what_the_head_reads_and_says(model: Path, tmp_path: Path) -> None:
    head = random_head(len(LAYERS))
    inner = {"mask_token_id": MASK, "target_layer_ids": LAYERS, "block_size": 3, "causal": True}
    factors = {"input_embedding_scale": 3.0, "output_multiplier": 0.5, "final_logit_softcapping": 1.25}
    folder = write_own(tmp_path / "head", head, LAYERS, dflash_config=inner | factors, block_size=None)
    llm = with_head(model, folder)
    drafts = recorded_drafts(llm)
    texts(llm, GREEDY)
    assert max(num_before for _, num_before, _ in drafts) == 1  # of blocks of 3
    check(drafts, model, head, is_causal=True, factors=(3.0, 0.5), softcap=1.25)


def test_a_model_whose_residual_stream_is_smaller(tmp_path: Path) -> None:
    """Gemma's embedding is not multiplied by its scale, but the head's norm has the outputs of the real model."""
    folder = write_tiny_folder(tmp_path / "model", "gemma3", sizes={"num_hidden_layers": 5})
    head = random_head(len(LAYERS))
    head["fc.weight"] /= 300  # so that the norm's eps counts
    llm = with_head(folder, write_own(tmp_path / "head", head, LAYERS))
    drafts = recorded_drafts(llm)
    assert texts(llm, GREEDY) == texts(LLM(str(folder), **OPTIONS), GREEDY)
    check(drafts, folder, head)


def check(
    drafts: list[tuple[list[int], int, Tensor]], model: Path, head: dict[str, Tensor], every: int = 3, **settings: Any
) -> None:
    """Compare the logits of every nth block with the reference, whose ``settings`` are those of the head."""
    whole = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    starts = [i for i, (_, num_before, _) in enumerate(drafts) if num_before == 0]
    blocks = [drafts[i:j] for i, j in zip(starts, [*starts[1:], len(drafts)], strict=True)]
    longest = max(map(len, blocks))
    assert longest > 1
    assert any(len(block) == 1 for block in blocks)  # before a text's end
    for block in blocks[::every]:
        tokens = block[0][0]
        with torch.no_grad():
            found = whole(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
            outputs = [found[layer + 1][0] for layer in LAYERS]
            embedding, lm_head = whole.model.embed_tokens.weight, whole.lm_head.weight
            expected, _ = drafted_logits(head, outputs, embedding, lm_head, tokens[-1], len(block), **settings)
        torch.testing.assert_close(torch.stack([logits for _, _, logits in block]), expected, atol=1e-4, rtol=1e-4)


def test_prefixes_forks_and_preemptions_keep_what_the_head_reads(model: Path, tmp_path: Path) -> None:
    """The cache has room for few blocks, each text begins like others, and each prompt has three completions."""
    head = random_head(len(LAYERS))
    sampled = replace(GREEDY, temperature=1.0, n=3, seed=4)
    llm = with_head(model, write_own(tmp_path / "head", head, LAYERS), kv_cache_memory=225_000)
    texts(llm, GREEDY)
    drafts = recorded_drafts(llm)
    found = texts(llm, sampled)
    stats = llm.engine.stats()
    assert stats.num_hit_tokens > 40
    assert stats.num_preemptions > 0
    assert found == texts(LLM(str(model), **OPTIONS), sampled)
    check(drafts, model, head, every=7)


@pytest.mark.parametrize(("params", "options"), OPTION_CASES)
def test_no_option_changes_a_text(model: Path, tmp_path: Path, params: SamplingParams, options: dict[str, Any]) -> None:
    llm = with_head(model, write_speculators(tmp_path / "head", random_head(len(LAYERS)), LAYERS), **options)
    found, stats = texts(llm, params), llm.engine.stats()
    assert found == texts(LLM(str(model), **OPTIONS | options | {"tensor_parallel_size": 1}), params)
    assert stats.num_drafted_tokens > 20
    assert stats.num_failed_draws == stats.num_failed_graphs == 0


def test_drafts_after_tokens_that_a_grammar_forces(model: Path, tmp_path: Path) -> None:
    """The model computes these in one step, so that the head cannot know the states of all but the last before it."""
    head = random_head(len(LAYERS))
    llm = with_head(model, write_own(tmp_path / "head", head, LAYERS))
    drafts = recorded_drafts(llm)
    params = replace(GREEDY, structured_outputs=StructuredOutputsParams(regex="([a-e]{3}wxyz)+"))
    assert texts(llm, params) == texts(LLM(str(model), **OPTIONS), params)
    check(drafts, model, head, every=1)


def test_a_head_that_is_right_saves_steps(tmp_path: Path) -> None:
    """The model repeats a token, and the head, whose features are zeros, drafts the one of the mask: also this one."""
    folder = write_flat_folder(tmp_path / "model")  # so that the first token is drawn again and again
    llm = with_head(folder, write_own(tmp_path / "head", random_head(len(LAYERS)), LAYERS))
    assert set(texts(llm, GREEDY)[0][0]) == {0}
    stats = llm.engine.stats()
    assert stats.num_accepted_tokens == stats.num_drafted_tokens > 40


def test_adapters_and_sleep(model: Path, tmp_path: Path) -> None:
    """The head reads the states of the adapted model, and the embedding that is loaded again."""
    head, adapter = random_head(len(LAYERS)), tmp_path / "adapter"
    write_adapter(adapter, read_hf_config(model / "config.json"))
    llm = with_head(model, write_own(tmp_path / "head", head, LAYERS), max_loras=1)
    check_adapter_and_sleep(llm, LLM(str(model), max_loras=1, **OPTIONS), adapter)
    drafts = recorded_drafts(llm)
    texts(llm, GREEDY)
    check(drafts, model, head, every=7)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"layer_types": [FULL, SLIDING]}, CheckpointFormatError, "sliding_window is missing"),
        (
            {"layer_types": [FULL, SLIDING], "sliding_window": 3, "is_causal": False},
            UnsupportedModelError,
            "sliding_window must be at least the block_size of 4, got 3",
        ),
        ({"use_swa": True}, CheckpointFormatError, "sliding_window is missing"),
        ({"use_swa": True, "swa_window_size": 0}, CheckpointFormatError, "swa_window_size: expected 1 to .*, got 0"),
        (
            {"attention_sink_bias": True},
            CheckpointFormatError,
            "tensor 'layers.0.self_attn.attention_sink_bias' is missing",
        ),
        ({"is_neox_style": False}, UnsupportedModelError, "is_neox_style must be True, got False"),
        ({"layer_types": 5}, CheckpointFormatError, "layer_types: expected list, got 5"),
        (
            {"layer_types": [[FULL]]},
            UnsupportedModelError,
            "layer_types must be full_attention and sliding_attention alone",
        ),
        (
            {"layer_types": [SLIDING], "sliding_window": 4},
            CheckpointFormatError,
            "layer_types: expected 2 entries, got 1",
        ),
        ({"model_type": ["qwen3"]}, CheckpointFormatError, r"model_type: expected str, got \['qwen3'\]"),
        ({"model_type": "gemma"}, UnsupportedModelError, "model_type must be one of .*, got 'gemma'"),
        ({"sample_from_anchor": 1}, CheckpointFormatError, "sample_from_anchor: expected bool, got 1"),
        ({"projector_type": "domino"}, UnsupportedModelError, "projector_type must be 'dflash', got 'domino'"),
        ({"draft_vocab_size": 9}, CheckpointFormatError, "'lm_head.weight' is missing, which draft_vocab_size=9 needs"),
        ({"block_size": 1}, CheckpointFormatError, "block_size: expected 2 to inf, got 1"),
        (
            {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [2, 1, 3]}},
            CheckpointFormatError,
            "target_layer_ids must be ascending numbers",
        ),
        ({"dflash_config": {"target_layer_ids": LAYERS}}, CheckpointFormatError, "mask_token_id is missing"),
        (
            {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [0, 2, 5]}},
            RequestError,
            r"reads the outputs of layers \(0, 2, 5\), but the model has 5 layers",
        ),
        (
            {"dflash_config": {"mask_token_id": VOCAB_SIZE, "target_layer_ids": LAYERS}},
            CheckpointFormatError,
            "mask_token_id: expected 0 to 319, got 320",
        ),
    ],
)
def test_wrong_heads_are_refused(
    model: Path, tmp_path: Path, settings: dict[str, Any], error: type[FastinferError], message: str
) -> None:
    head = write_own(tmp_path / "head", random_head(len(LAYERS)), LAYERS, **settings)
    with pytest.raises(error, match=message):
        with_head(model, head)


@pytest.mark.parametrize(
    ("settings", "layers", "damage", "error", "message"),
    [
        ({}, [2, 1], "", GGUFFormatError, r"target_layers must be ascending numbers, got \[3, 2\]"),
        ({"mask": VOCAB_SIZE}, LAYERS, "", GGUFFormatError, "mask_token_id.* expected .* 319, got 320"),
        ({"block_size": 1}, LAYERS, "", GGUFFormatError, "block_size.*got 1"),
        (
            {"sliding_window": 5, "sliding_window_pattern": [True]},
            LAYERS,
            "",
            GGUFFormatError,
            "sliding_window_pattern: expected 2 values, one for each layer, got 1",
        ),
        ({}, LAYERS, "blk.0.attn_sinks", GGUFFormatError, r"blk.0.attn_sinks.weight' must have the shape \(4,\), got"),
        ({}, [-1, 2, 3], "", RequestError, r"reads the outputs of layers \(-1, 2, 3\), but the model has 5 layers"),
    ],
)
def test_wrong_gguf_heads_are_refused(
    model: Path,
    tmp_path: Path,
    settings: dict[str, Any],
    layers: list[int],
    damage: str,
    error: type[FastinferError],
    message: str,
) -> None:
    tensors = random_head(len(layers))
    if damage:
        tensors[f"{damage}.weight"] = torch.ones(4, 4)
    head = write_gguf_head(tmp_path / "head", tensors, layers, **settings)
    with pytest.raises(error, match=message):
        with_head(model, head)


def test_a_head_is_no_model_and_drafts_one_block_at_most(model: Path, tmp_path: Path) -> None:
    head = write_own(tmp_path / "head", random_head(len(LAYERS)), LAYERS)
    with pytest.raises(RequestError, match="the model must be a whole one, got a draft head"):
        LLM(str(head))
    llm = with_head(model, head, num_speculative_tokens=9)
    drafts = recorded_drafts(llm)
    texts(llm, GREEDY)
    assert max(num_before for _, num_before, _ in drafts) == BLOCK_SIZE - 2
    speculator = llm.engine.speculator
    assert speculator is not None
    assert speculator.draft_seconds(0) == 0 < speculator.draft_seconds(1) == speculator.draft_seconds(3)
    with pytest.raises(RequestError, match="pipeline_parallel_size must be 1 with a draft head, got 2"):
        with_head(model, head, pipeline_parallel_size=2)
