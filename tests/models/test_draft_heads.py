"""EAGLE-3 heads in the formats of others: their drafts are those of a reference, and change no text."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from support.drafts import GREEDY, OPTIONS, check_adapter_and_sleep, recorded_drafts, texts
from support.eagle_heads import (
    VOCAB_SIZE,
    drafted_logits,
    random_head,
    write_gguf_head,
    write_specforge,
    write_speculators,
)
from support.peft_adapter import write_adapter
from support.tiny_decoder import CONFIG
from support.tiny_folder import write_tiny_folder
from support.toy import always_speculate
from torch import Tensor

from fastinfer import LLM, SamplingParams
from fastinfer.errors import CheckpointFormatError, FastinferError, GGUFFormatError, RequestError, UnsupportedModelError
from fastinfer.models.eagle_head import EagleHead
from fastinfer.models.hf_config import read_hf_config
from fastinfer.models.norm import RMSNorm
from fastinfer.structured_output import StructuredOutputsParams
from fastinfer.weights.weight import DenseWeight

NUM_LAYERS = 7


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("model") / "model", sizes={"num_hidden_layers": NUM_LAYERS})


def with_head(model: Path, head: Path, **options: Any) -> LLM:
    llm = LLM(str(model), draft_model=str(head), num_speculative_tokens=3, **OPTIONS | options)
    always_speculate(llm.engine)
    return llm


@pytest.mark.parametrize(
    ("write", "num_aux", "settings", "expected_aux"),
    [
        (write_speculators, 3, {}, (2, 3, 4)),
        (
            write_speculators,
            2,
            {"eagle_aux_hidden_state_layer_ids": [1, NUM_LAYERS], "norm_before_residual": True, "fc_norm": True},
            (1, NUM_LAYERS),
        ),
        (
            write_speculators,
            3,
            {"model_type": "qwen3", "norm_before_fc": True, "norm_output": True},
            (2, 3, 4),
        ),
        (write_specforge, 3, {}, (2, 3, 4)),
        (write_gguf_head, 3, {"extract_layers": [1, 3, 6], "norm_before_residual": True}, (1, 3, 6)),
        (write_specforge, 2, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 4]}}, (1, 5)),
    ],
)
def test_drafts_are_those_of_the_reference(
    model: Path,
    tmp_path: Path,
    write: Callable[..., Path],
    num_aux: int,
    settings: dict[str, Any],
    expected_aux: tuple[int, ...],
) -> None:
    head = random_head(num_aux, **settings)
    llm = with_head(model, write(tmp_path / "head", head, **settings))
    drafts = recorded_drafts(llm)
    assert texts(llm, GREEDY) == texts(LLM(str(model), **OPTIONS), GREEDY)
    check(drafts[::5], model, head, expected_aux, **settings)


def check(
    drafts: list[tuple[list[int], int, Tensor]],
    model: Path,
    head: dict[str, Tensor],
    aux_layers: tuple[int, ...],
    **settings: Any,
) -> None:
    """Compare the logits of drafts with the reference."""
    whole = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    assert {num_drafts for _, num_drafts, _ in drafts} == {0, 1, 2}
    for tokens, num_drafts, logits in drafts:
        text = torch.tensor([tokens[: len(tokens) - num_drafts - 1]])
        with torch.no_grad():
            states = _layer_inputs(whole, text)
        expected = drafted_logits(head, [states[layer] for layer in aux_layers], tokens, num_drafts, **settings)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def _layer_inputs(model: Any, text: Tensor) -> list[Tensor]:
    """Inputs of all layers, and the output of the last one before the norm."""
    outputs: list[Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda _, args, out: outputs.append((args[0][0], out)))
        for layer in model.model.layers
    ]
    model(text)
    for hook in hooks:
        hook.remove()
    last = outputs[-1][1]
    return [pair[0] for pair in outputs] + [(last[0] if isinstance(last, tuple) else last)[0]]


def test_prefixes_forks_and_preemptions_keep_features(model: Path, tmp_path: Path) -> None:
    """The cache has room for few blocks, each text begins like others, and each prompt has three completions."""
    head = random_head()
    sampled = replace(GREEDY, temperature=1.0, n=3, seed=4)
    llm = with_head(model, write_speculators(tmp_path / "head", head), kv_cache_memory=250_000)
    texts(llm, GREEDY)
    drafts = recorded_drafts(llm)
    found = texts(llm, sampled)
    stats = llm.engine.stats()
    assert stats.num_hit_tokens > 40
    assert stats.num_preemptions > 0
    assert found == texts(LLM(str(model), **OPTIONS), sampled)
    check(drafts[::17], model, head, (2, 3, 4))


@pytest.mark.parametrize(
    ("params", "options"),
    [
        (replace(GREEDY, structured_outputs=StructuredOutputsParams(regex="[^a]{30,}")), {}),
        (replace(GREEDY, temperature=1.5, seed=1, repetition_penalty=1.2, logprobs=2), {"dtype": "auto"}),
        (replace(GREEDY, temperature=0.7, seed=2, prompt_logprobs=1), {"kv_cache_dtype": "int8", "dtype": "bfloat16"}),
        (GREEDY, {"enforce_eager": True, "enable_prefix_caching": False, "sparse_attention": 0.6, "block_size": 2}),
    ],
)
def test_no_option_changes_a_text(model: Path, tmp_path: Path, params: SamplingParams, options: dict[str, Any]) -> None:
    llm = with_head(model, write_specforge(tmp_path / "head", random_head()), **options)
    assert texts(llm, params) == texts(LLM(str(model), **OPTIONS | options), params)
    stats = llm.engine.stats()
    assert stats.num_drafted_tokens > 20
    assert stats.num_failed_draws == stats.num_failed_graphs == 0


def test_adapters_and_sleep(model: Path, tmp_path: Path) -> None:
    """Features are those of the adapted model; a head without an embedding reads the model's, loaded again, too."""
    head = random_head()
    del head["embed_tokens.weight"]
    adapter = tmp_path / "adapter"
    write_adapter(adapter, read_hf_config(model / "config.json"))
    llm = with_head(model, write_speculators(tmp_path / "head", head), max_loras=1)
    check_adapter_and_sleep(llm, LLM(str(model), max_loras=1, **OPTIONS), adapter)
    whole = transformers.AutoModelForCausalLM.from_pretrained(model)
    drafts = recorded_drafts(llm)
    texts(llm, GREEDY)
    check(drafts[::9], model, head | {"embed_tokens.weight": whole.model.embed_tokens.weight.detach()}, (2, 3, 4))


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        (
            {"speculators_model_type": "peagle"},
            UnsupportedModelError,
            "must be 'eagle3', 'dflash', 'dflash2' or 'dspark', got 'peagle'",
        ),
        ({"transformer_layer_config": None}, CheckpointFormatError, "transformer_layer_config is missing"),
        ({"target_hidden_size": 80}, UnsupportedModelError, "target_hidden_size must be the hidden size of 64, got 80"),
        (
            {"eagle_aux_hidden_state_layer_ids": [3, 1]},
            CheckpointFormatError,
            r"must be ascending numbers, got \[3, 1\]",
        ),
        ({"eagle_aux_hidden_state_layer_ids": [1, 1, 3]}, CheckpointFormatError, "must be ascending numbers"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}, RequestError, r"layers \(-1, 0, 2\), but the model has 7"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, RequestError, r"layers \(0, 1, 8\), but the model has 7"),
        ({"eagle_aux_hidden_state_layer_ids": [1]}, CheckpointFormatError, r"fc must have the shape \[64, 64\]"),
    ],
)
def test_wrong_heads_are_refused(
    model: Path, tmp_path: Path, config: dict[str, Any], error: type[FastinferError], message: str
) -> None:
    with pytest.raises(error, match=message):
        with_head(model, write_speculators(tmp_path / "head", random_head(), **config))


def test_a_head_with_a_part_of_the_vocabulary_has_its_own_output_layer(model: Path, tmp_path: Path) -> None:
    folder = write_speculators(tmp_path / "head", head := random_head())
    save_file({name: values for name, values in head.items() if name != "lm_head.weight"}, folder / "model.safetensors")
    with pytest.raises(CheckpointFormatError, match=r"'lm_head\.weight' is missing, which draft_vocab_size=97 needs"):
        with_head(model, folder)


def test_a_head_without_a_size_drafts_all_tokens(model: Path, tmp_path: Path) -> None:
    head = random_head()
    del head["d2t"], head["t2d"]
    head["lm_head.weight"] = torch.randn(VOCAB_SIZE, head["lm_head.weight"].shape[1])
    llm = with_head(model, write_specforge(tmp_path / "head", head, draft_vocab_size=None))
    drafts = recorded_drafts(llm)
    assert texts(llm, GREEDY) == texts(LLM(str(model), **OPTIONS), GREEDY)
    check(drafts[::9], model, head, (2, 3, 4))


def test_gguf_heads_may_have_the_models_embedding_and_vocabulary(model: Path, tmp_path: Path) -> None:
    head = random_head()
    whole = transformers.AutoModelForCausalLM.from_pretrained(model)
    shared = {"embed_tokens.weight": whole.model.embed_tokens.weight.detach(), "lm_head.weight": whole.lm_head.weight}
    own = {name: values for name, values in head.items() if name not in (*shared, "d2t")}
    path = write_gguf_head(tmp_path / "head", own, extract_layers=[2, 3, 4])
    with pytest.raises(RequestError, match="the model must be a whole one, got a draft head"):
        LLM(str(path))
    llm = with_head(model, path)
    drafts = recorded_drafts(llm)
    texts(llm, GREEDY)
    check(drafts[::9], model, own | {name: values.detach() for name, values in shared.items()}, (2, 3, 4))


@pytest.mark.parametrize(
    ("settings", "damage", "error", "message"),
    [
        ({"extract_layers": [3, 1, 2]}, {}, GGUFFormatError, r"extract_layers must be ascending .* got \[3, 1, 2\]"),
        ({"target_hidden_size": 80}, {}, UnsupportedModelError, "must be the hidden size of 64, got 80"),
        ({}, {"d2t": -torch.arange(97)}, GGUFFormatError, "must give each row another token, got 0 97 times"),
        ({}, {"d2t": torch.full((97,), 300)}, GGUFFormatError, "must give tokens in 0..319, got 320 for row 20"),
    ],
)
def test_wrong_gguf_heads_are_refused(
    model: Path,
    tmp_path: Path,
    settings: dict[str, Any],
    damage: dict[str, Tensor],
    error: type[FastinferError],
    message: str,
) -> None:
    settings = {"extract_layers": [2, 3, 4]} | settings
    head = write_gguf_head(tmp_path / "head", random_head() | damage, **settings)
    with pytest.raises(error, match=message):
        with_head(model, head)


def test_a_head_is_no_model_and_fits_one_size(model: Path, tmp_path: Path) -> None:
    head = write_speculators(tmp_path / "head", random_head())
    with pytest.raises(RequestError, match="the model must be a whole one, got a draft head"):
        LLM(str(head))
    short = write_tiny_folder(tmp_path / "short", sizes={"num_hidden_layers": 6})
    with pytest.raises(RequestError, match="names no layers needs a model of at least 7 layers, got 6"):
        with_head(short, head)
    wide = write_tiny_folder(tmp_path / "wide", sizes={"hidden_size": 96})
    with pytest.raises(RequestError, match="must have the model's hidden size of 96, got 64"):
        with_head(wide, head)


@pytest.mark.parametrize("has_norms", [False, True])
def test_features_of_a_model_whose_stream_is_smaller(has_norms: bool) -> None:
    """They are those of the checkpoint's model, also where eps matters."""
    hidden = CONFIG.hidden_size
    norm = RMSNorm(torch.rand(hidden) + 0.5, 0.25)
    head = EagleHead(
        config=CONFIG,
        dtype=torch.float32,
        exact=True,
        embedding=None,
        layers=(),
        norm=norm,
        lm_head=None,
        token_norm=norm,
        feature_norm=norm,
        aux_layers=(1, 2),
        fc=DenseWeight(torch.randn(hidden, 2 * hidden)),
        aux_norms=(norm, norm) if has_norms else (),
    )
    outputs, found = [torch.randn(5, hidden) for _ in range(2)], []
    for scale in (1.0, 0.25):
        config = replace(CONFIG, residual_scale=scale, num_layers=3)
        model: Any = SimpleNamespace(config=config, embedding=None, lm_head=None)
        found.append(head.for_model(model, 8).features([x / scale for x in outputs]))
    torch.testing.assert_close(*found)
