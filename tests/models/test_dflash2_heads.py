"""DFlash2 heads: convolutions over the tokens of a block, and drafts that are chosen by the one before."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.dflash_heads import (
    BLOCK_SIZE,
    CODEBOOKS,
    DRAFT_VOCAB,
    MASK,
    SECOND,
    random_head,
    write_gguf_head,
    write_own,
    write_speculators,
)
from support.draft_blocks import (
    FULL,
    LAYERS,
    OPTION_CASES,
    SLIDING,
    check_blocks,
    recorded_blocks,
    with_head,
    write_flat_folder,
)
from support.drafts import GREEDY, OPTIONS, check_adapter_and_sleep, texts
from support.eagle_heads import HIDDEN, VOCAB_SIZE
from support.fake_cuda_graph import use_fakes, with_twin
from support.peft_adapter import write_adapter
from support.tiny_folder import write_tiny_folder
from torch import Tensor

from fastinfer import LLM, SamplingParams
from fastinfer.errors import CheckpointFormatError, FastinferError, GGUFFormatError, UnsupportedModelError
from fastinfer.models.attention import Attention
from fastinfer.models.batch import Batch
from fastinfer.models.block_conv import BlockConv
from fastinfer.models.draft_chain import MISSING, CandidateSelector
from fastinfer.models.hf_config import read_hf_config
from fastinfer.weights.weight import DenseWeight

WINDOWS = {"is_causal": False, "layer_types": [SLIDING, SLIDING], "sliding_window": 9}
Write = Callable[..., Path]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("model") / "model", sizes={"num_hidden_layers": 5})


def second_head(**settings: Any) -> dict[str, Tensor]:
    return random_head(len(LAYERS), **SECOND, **settings)


def test_convolutions_read_no_other_block() -> None:
    generator = torch.Generator().manual_seed(3)
    base = torch.randn(2, 3, 2, 4, generator=generator)
    projection = torch.randn(2 * 3 * 2, 8, generator=generator)
    conv = BlockConv(base, DenseWeight(projection))
    x, y = torch.randn(2, 5, 8, generator=generator)
    places = torch.tensor([0, 0, 1, 2, 3], dtype=torch.int32)
    x[0] = torch.nan  # a block of one token
    before, kernels = conv.before(x, places)
    after = conv.after(y, kernels, places)
    for source, found, side in ((x, before, 0), (y, after, 1)):
        for token in range(1, 5):
            shared = (projection @ x[token]).view(2, 3, 2, 1)[side]
            weights = (base[side] + shared).flatten(1)
            expected = sum(weights[tap] * source[token - tap] for tap in range(min(3, token)))
            torch.testing.assert_close(found[token], expected)


def test_candidates_are_the_likeliest_tokens() -> None:
    generator = torch.Generator().manual_seed(4)
    projection, before, after = (torch.randn(size, generator=generator) for size in ((6, 16), (40, 6), (40, 6)))
    selector = CandidateSelector(*map(DenseWeight, (projection, before, after)), top_k=5)
    logits, hidden = torch.randn(3, 40, generator=generator), torch.randn(3, 16, generator=generator)
    found = selector(logits, hidden, torch.tensor([7, 0, 39]))
    for row, token in enumerate((7, 0, 39)):
        expected = torch.full((40,), MISSING)
        for index in logits[row].argsort(descending=True)[:5]:
            expected[index] = logits[row, index] + (before[token] * (projection @ hidden[row]) * after[index]).sum()
        torch.testing.assert_close(found[row], expected)


@pytest.mark.parametrize(
    ("write", "settings", "expected"),
    [
        (write_own, {}, {}),
        (write_own, WINDOWS, {"windows": (9, 9), "whole_windows": True}),
        (write_own, {"layer_types": [FULL, SLIDING], "sliding_window": 6}, {"windows": (0, 6)}),
        (write_own, {"is_causal": True}, {"is_causal": True}),
        (
            write_speculators,
            {"layer_types": [FULL, SLIDING], "sliding_window": 7, "sliding_window_non_causal": True},
            {"windows": (0, 7), "whole_windows": True},
        ),
        (write_gguf_head, {}, {}),
        (
            write_gguf_head,
            {"sliding_window": 6, "sliding_window_pattern": [True, False]},
            {"windows": (6, 0), "whole_windows": True},
        ),
    ],
)
def test_drafts_are_those_of_the_reference(
    model: Path, tmp_path: Path, write: Write, settings: dict[str, Any], expected: dict[str, Any]
) -> None:
    head = second_head()
    llm = with_head(model, write(tmp_path / "head", head, LAYERS, **SECOND, **settings))
    blocks = recorded_blocks(llm)
    assert texts(llm, GREEDY) == texts(LLM(str(model), **OPTIONS), GREEDY)
    check_blocks(blocks, model, head, **expected)


def test_settings_of_the_logits_count_before_the_choice(model: Path, tmp_path: Path) -> None:
    head = second_head()
    inner = {"mask_token_id": MASK, "target_layer_ids": LAYERS, "block_size": BLOCK_SIZE, **SECOND}
    factors = {"input_embedding_scale": 3.0, "output_multiplier": 2.0, "final_logit_softcapping": 9.0}
    settings = {"architectures": ["DFlash2DraftModel"], "dflash_config": inner | factors}
    llm = with_head(model, write_own(tmp_path / "head", head, LAYERS, **settings))
    blocks = recorded_blocks(llm)
    texts(llm, GREEDY)
    check_blocks(blocks, model, head, factors=(3.0, 2.0), softcap=9.0, every=1)


def test_prefixes_forks_and_preemptions(model: Path, tmp_path: Path) -> None:
    """The cache has room for few blocks, each text begins like others, and each prompt has three completions."""
    head = second_head()
    sampled = replace(GREEDY, temperature=1.0, n=3, seed=4)
    llm = with_head(model, write_own(tmp_path / "head", head, LAYERS, **SECOND), kv_cache_memory=225_000)
    texts(llm, GREEDY)
    found = texts(llm, sampled)
    stats = llm.engine.stats()
    assert stats.num_hit_tokens > 40
    assert stats.num_preemptions > 0
    assert found == texts(LLM(str(model), **OPTIONS), sampled)
    blocks = recorded_blocks(llm)
    texts(llm, GREEDY)
    check_blocks(blocks, model, head)


@pytest.mark.parametrize(("params", "options"), OPTION_CASES)
def test_no_option_changes_a_text(model: Path, tmp_path: Path, params: SamplingParams, options: dict[str, Any]) -> None:
    head = write_own(tmp_path / "head", second_head(), LAYERS, **SECOND, **WINDOWS)
    llm = with_head(model, head, **options)
    found, stats = texts(llm, params), llm.engine.stats()
    assert found == texts(LLM(str(model), **OPTIONS | options | {"tensor_parallel_size": 1}), params)
    assert stats.num_drafted_tokens > 20
    assert stats.num_failed_draws == stats.num_failed_graphs == 0


@pytest.mark.parametrize("params", [GREEDY, replace(GREEDY, temperature=1.0, seed=3)])
def test_graphs_of_a_gpu_pad_blocks(
    model: Path, tmp_path: Path, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fakes of graphs, which read what was uploaded alone; attention on a CPU does without the padding."""
    attend = Attention._attend

    def attend_to_tokens(self: Attention, q: Tensor, batch: Batch, *others: Any) -> Tensor:
        out, count = torch.full_like(q, 1e3), int(batch.query_start[-1])
        if count:
            out[:count] = attend(self, q[:count], batch, *others)
        return out

    head = second_head()
    expected = texts(LLM(str(model), **OPTIONS), params)
    folder = write_own(tmp_path / "head", head, LAYERS, **SECOND, **WINDOWS)
    llm = with_head(model, folder, enforce_eager=True)
    worker = llm.engine.draft_worker
    assert worker is not None
    use_fakes(monkeypatch)
    monkeypatch.setattr(Attention, "_attend", attend_to_tokens)
    with llm.engine._context():
        with_twin(worker.runner.inputs)
        worker.runner._enforce_eager = False
        worker.runner.graphs = worker.runner._make_graphs()
    blocks = recorded_blocks(llm)
    assert texts(llm, params) == expected
    assert worker.num_eager_steps == 0
    if params is GREEDY:
        check_blocks(blocks, model, head, windows=(9, 9), whole_windows=True)


def test_a_sampled_draft_is_drawn_after_the_one_before(tmp_path: Path) -> None:
    """The model's logits are all equal, so that a token is drawn by the noise alone, and the head draws the same."""
    folder = write_flat_folder(tmp_path / "model")
    settings = SECOND | {"selector_top_k": VOCAB_SIZE}
    head = second_head()
    head["candidate_selector.hidden_projection.weight"].zero_()
    llm = with_head(folder, write_own(tmp_path / "head", head, LAYERS, **settings))
    texts(llm, replace(GREEDY, temperature=1.0, seed=3))
    stats = llm.engine.stats()
    assert stats.num_accepted_tokens == stats.num_drafted_tokens > 40


def test_penalties_count_the_drafts_before(tmp_path: Path) -> None:
    """The model draws the first tokens in turn, because each lowers its own logit, and so does the head."""
    folder = write_flat_folder(tmp_path / "model")
    head = second_head()
    head["candidate_selector.hidden_projection.weight"].zero_()
    settings = SECOND | {"selector_top_k": VOCAB_SIZE}
    llm = with_head(folder, write_own(tmp_path / "head", head, LAYERS, **settings))
    found = texts(llm, replace(GREEDY, presence_penalty=1.0))
    assert len(set(found[0][0])) == GREEDY.max_tokens
    stats = llm.engine.stats()
    assert stats.num_accepted_tokens == stats.num_drafted_tokens > 40


def test_a_draft_that_cannot_be_drawn_ends_its_block(model: Path, tmp_path: Path) -> None:
    head = second_head()
    head[CODEBOOKS[0]][:] = torch.nan
    llm = with_head(model, write_own(tmp_path / "head", head, LAYERS, **SECOND))
    blocks = recorded_blocks(llm)
    assert texts(llm, GREEDY) == texts(LLM(str(model), **OPTIONS), GREEDY)
    assert len(blocks) > 10
    assert not any(drafts for _, _, drafts in blocks)


def test_adapters_and_sleep(model: Path, tmp_path: Path) -> None:
    head, adapter = second_head(), tmp_path / "adapter"
    write_adapter(adapter, read_hf_config(model / "config.json"))
    llm = with_head(model, write_own(tmp_path / "head", head, LAYERS, **SECOND), max_loras=1)
    check_adapter_and_sleep(llm, LLM(str(model), max_loras=1, **OPTIONS), adapter)
    blocks = recorded_blocks(llm)
    texts(llm, GREEDY)
    check_blocks(blocks, model, head)


@pytest.mark.parametrize(
    ("settings", "damage", "error", "message"),
    [
        ({"conv_group_size": None}, {}, CheckpointFormatError, "conv_group_size is missing"),
        ({"selector_rank": None}, {}, CheckpointFormatError, "selector_rank is missing"),
        ({"selector_top_k": VOCAB_SIZE + 1}, {}, CheckpointFormatError, "selector_top_k: expected 1 to 320, got 321"),
        (
            {"conv_group_size": 5},
            {},
            UnsupportedModelError,
            "conv_group_size must divide the hidden size of 64, got 5",
        ),
        (
            {"draft_vocab_size": DRAFT_VOCAB},
            {},
            UnsupportedModelError,
            "draft_vocab_size must be the vocabulary of 320 tokens for a head that selects candidates, got 101",
        ),
        ({"draft_ffn_type": "moe"}, {}, UnsupportedModelError, "draft_ffn_type must be 'dense', got 'moe'"),
        (
            {},
            {"layers.1.mlp_conv.base_kernel": torch.ones(2, 2, HIDDEN)},
            CheckpointFormatError,
            r"mlp_conv.base_kernel' must have the shape \[2, 3, 64\], got \[2, 2, 64\]",
        ),
        (
            {},
            {CODEBOOKS[0]: torch.ones(VOCAB_SIZE, 5)},
            CheckpointFormatError,
            r"predecessor_codebook must have the shape \[320, 24\], got \[320, 5\]",
        ),
    ],
)
def test_wrong_heads_are_refused(
    model: Path,
    tmp_path: Path,
    settings: dict[str, Any],
    damage: dict[str, Tensor],
    error: type[FastinferError],
    message: str,
) -> None:
    head = second_head(**{name: size for name, size in settings.items() if name == "draft_vocab_size"})
    folder = write_own(tmp_path / "head", head | damage, LAYERS, **SECOND | settings)
    with pytest.raises(error, match=message):
        with_head(model, folder)


def test_wrong_gguf_heads_are_refused(model: Path, tmp_path: Path) -> None:
    head, settings = second_head(), {**SECOND, "sliding_window": 3, "sliding_window_pattern": [True, False]}
    wrong = head | {"layers.0.attention_conv.base_kernel": torch.ones(2, 3, 4)}
    with pytest.raises(GGUFFormatError, match=r"attn_conv_base' must be dense with the shape \(2, 3, 64\), got F32"):
        with_head(model, write_gguf_head(tmp_path / "shape", wrong, LAYERS, **SECOND))
    with pytest.raises(UnsupportedModelError, match="sliding_window must be at least the block_size of 4, got 3"):
        with_head(model, write_gguf_head(tmp_path / "window", head, LAYERS, **settings))
    del settings["selector_rank"]
    with pytest.raises(GGUFFormatError, match=r"dflash\.selector_rank"):
        with_head(model, write_gguf_head(tmp_path / "rank", head, LAYERS, **settings))
