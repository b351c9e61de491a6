"""Sparse attention in the engine: a text follows from its request alone, and with all pages it is dense."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import mixed_decoder
from support.kv_files import wait_for_files
from support.random_checkpoint import RandomCheckpoint, int4
from support.toy import ToyTokenizer, drain
from support.ways import PARAMS, PROMPTS, answers, preempted, twice, with_drafts

from fastinfer import ops
from fastinfer.engine import batch_inputs
from fastinfer.engine.config import EngineConfig
from fastinfer.engine.construction import kv_cache_size
from fastinfer.engine.engine import Engine
from fastinfer.engine.prompt_layout import Piece, PromptLayout
from fastinfer.errors import RequestError
from fastinfer.models.config import KVShape, LatentAttentionConfig, ModelConfig, Precision
from fastinfer.models.decoder import Decoder
from fastinfer.models.loader import load_decoder

SHARE = 0.8
DENSE_PAGES = 3
LIMITS: dict[str, Any] = {"num_kv_blocks": 128, "max_num_seqs": 8}
# A layer with a window, two with full attention, and one that shares the keys of such a layer.
MIXED = {"num_layers": 6, "windows": (0, 0, 8, 0, 0, 0), "kv_layers": (0, 1, 2, 3, 4, 4)}


def make_decoder(**changes: Any) -> Decoder:
    config: ModelConfig = replace(mixed_decoder.CONFIG, **changes)
    return load_decoder(RandomCheckpoint(config, lambda _, values: int4(values)), Precision.of("auto"), None)


@pytest.fixture(autouse=True)
def sparse_from_the_fourth_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_inputs, "DENSE_PAGES", DENSE_PAGES)


def make_draft() -> Decoder:
    """A model that is often wrong: its tokens are in another order."""
    checkpoint = RandomCheckpoint(mixed_decoder.CONFIG, lambda _, values: int4(values.flip(0)))
    return load_decoder(checkpoint, Precision.of("auto"), None)


# Pages alone, and also the codes of the other pages, which a cap of the logits rules out.
@pytest.fixture(scope="module", params=[5.0, 0.0], ids=["pages", "pages and codes"])
def decoder(request: pytest.FixtureRequest) -> Decoder:
    return make_decoder(**MIXED, attention_softcap=request.param)


def block_size_of(decoder: Decoder) -> int:
    """Codes of values need blocks of eight tokens."""
    return 4 if decoder.config.attention_softcap else 8


def engine_of(decoder: Decoder, **limits: Any) -> Engine:
    limits = {
        **LIMITS,
        "block_size": block_size_of(decoder),
        "max_num_batched_tokens": 96,
        "deterministic": True,
        "sparse_attention": SHARE,
        **limits,
    }
    draft = {"draft_model": make_draft()} if limits.get("num_speculative_tokens") == 3 else {}
    engine = Engine(decoder, ToyTokenizer(), EngineConfig(**limits), fingerprint="sparse", **draft)  # type: ignore[arg-type]
    for tensor in (tensor for cache in engine.worker.kv_cache for tensor in cache.tensors):
        tensor.view(torch.uint8).fill_(0xFF)  # NaN
    return engine


def alone(decoder: Decoder, **limits: Any) -> list[Any]:
    return answers(engine_of(decoder, max_num_seqs=1, enable_prefix_caching=False, enforce_eager=True, **limits))


def with_wrong_drafts(engine: Engine) -> list[Any]:
    """They fill pages that are then filled with other tokens."""
    found = with_drafts(engine)
    assert engine.stats().num_accepted_tokens < engine.stats().num_drafted_tokens - 20
    return found


WAYS: dict[str, Callable[[Decoder], list[Any]]] = {
    "batched": lambda decoder: answers(engine_of(decoder)),
    "chunked": lambda decoder: answers(engine_of(decoder, max_num_batched_tokens=8 * block_size_of(decoder) + 3)),
    "prefix hits": lambda decoder: twice(engine_of(decoder)),
    "preempted": lambda decoder: preempted(
        engine_of(decoder, num_kv_blocks=96 // block_size_of(decoder), max_model_len=88)
    ),
    "n-grams": lambda decoder: with_drafts(engine_of(decoder, num_speculative_tokens=5)),
    "a draft model": lambda decoder: with_wrong_drafts(engine_of(decoder, num_speculative_tokens=3)),
    "three copies": lambda decoder: answers(engine_of(decoder), replace(PARAMS, n=3)),
    "without graphs": lambda decoder: answers(engine_of(decoder, enforce_eager=True)),
}


def test_a_text_follows_from_its_request_alone(decoder: Decoder) -> None:
    expected = alone(decoder)
    dense = alone(decoder, sparse_attention=None)
    is_dense = [one == other for one, other in zip(expected, dense, strict=True)]
    pages = [(len(prompt) + PARAMS.max_tokens - 2) // block_size_of(decoder) + 1 for prompt in PROMPTS]
    assert is_dense == [count <= DENSE_PAGES for count in pages]
    assert is_dense.count(False) >= 3
    for name, way in WAYS.items():
        assert way(decoder) == expected, name


def test_all_pages_are_dense_bit_by_bit(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    dense = alone(decoder, sparse_attention=None)
    assert answers(engine_of(decoder, sparse_attention=1.0)) == dense
    monkeypatch.setattr(batch_inputs, "DENSE_PAGES", 24)
    assert answers(engine_of(decoder)) == dense


def test_prompts_choose_pages(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles end with blocks, and of a step with generated tokens these are rows of their own."""
    rows: list[list[int]] = []

    def select_pages(q: torch.Tensor, *, row_start: torch.Tensor | None = None, **options: Any) -> Any:
        if row_start is not None:
            rows.append(row_start.tolist())
        return select(q, row_start=row_start, **options)

    select = ops.select_pages
    monkeypatch.setattr(ops, "select_pages", select_pages)
    size = block_size_of(decoder)
    engine = engine_of(decoder, max_num_batched_tokens=10 * size, enforce_eager=True)
    engine.add_request(PROMPTS[3], PARAMS)
    engine.step()
    assert rows == [[0, *range(size, 13, size), 13]] * 2  # in two layers: the third has no keys of its own
    rows.clear()
    engine.add_request(PROMPTS[2], PARAMS)
    engine.step()
    count = min(len(PROMPTS[2]), (10 * size - 1) // size * size)
    assert rows[0] == [0, 1, *range(1 + size, 1 + count, size), 1 + count]


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8, torch.float8_e4m3fn, torch.uint8])
def test_caches(decoder: Decoder, dtype: torch.dtype) -> None:
    limits = {"kv_cache_dtype": dtype, "num_speculative_tokens": 3}
    assert with_wrong_drafts(engine_of(decoder, **limits)) == alone(decoder, kv_cache_dtype=dtype)


def test_codes_are_kept_beyond_the_cache(decoder: Decoder, tmp_path: Path) -> None:
    expected, num_blocks = alone(decoder), 160 // block_size_of(decoder)
    for _ in range(2):
        engine = engine_of(decoder, kv_offloading_dir=str(tmp_path), num_kv_blocks=num_blocks, max_model_len=88)
        assert answers(engine) == expected
        assert engine.offloading is not None
        assert engine.offloading.disk is not None
        wait_for_files(engine.offloading.disk)
    assert engine.stats().num_loaded_disk_blocks > num_blocks // 2


def test_only_later_layers_with_full_attention_and_keys_of_their_own_have_codes(decoder: Decoder) -> None:
    layers = engine_of(decoder).worker.kv_cache.layers
    assert [layer.key_codes is not None for layer in layers] == [False, False, False, True, True, True]  # type: ignore[union-attr]
    assert layers[4] is layers[5]
    draft = engine_of(decoder, num_speculative_tokens=3).draft_worker
    assert draft is not None
    assert all(layer.key_codes is None for layer in draft.kv_cache.layers)  # type: ignore[union-attr]


def test_memory(decoder: Decoder) -> None:
    """The cache has the size that was chosen for it."""
    config = EngineConfig(**LIMITS, block_size=block_size_of(decoder), sparse_attention=SHARE)
    size = kv_cache_size(config, [decoder.config])
    layers = {id(layer): layer for layer in engine_of(decoder).worker.kv_cache}.values()
    assert size.num_bytes == sum(tensor.nbytes for layer in layers for tensor in layer.tensors)


@pytest.mark.parametrize("softcap", [5.0, 0.0])
def test_prompts_of_modules(softcap: float) -> None:
    """Tiles end with blocks and where other blocks are seen, whatever is in the cache."""
    decoder = make_decoder(num_layers=4, windows=(0, 0, 0, 0), attention_softcap=softcap)
    pieces = [
        [
            Piece(list(range(1, 30)), 0, True),
            Piece([50], 29),
            Piece(list(range(30, 50)), 31, True),
            Piece([51] * 3, 51),
        ],
        [Piece(list(range(30, 50)), 31, True), Piece([7] * 9, 51)],
    ]

    def texts(engine: Engine, order: list[int]) -> list[Any]:
        found: dict[int, Any] = {}
        for index in order:
            layout = PromptLayout(pieces[index], block_size_of(decoder), 1)
            name = engine.add_request(engine.validate(layout.token_ids, PARAMS, layout=layout), PARAMS)
            [completion] = drain(engine)[name].outputs
            found[index] = completion.token_ids, completion.logprobs
        return [found[index] for index in sorted(found)]

    expected = texts(engine_of(decoder), [0, 1])
    assert texts(engine_of(decoder), [1, 0]) == expected
    assert texts(engine_of(decoder, max_num_batched_tokens=8 * block_size_of(decoder) + 1), [0, 1]) == expected
    assert texts(engine_of(decoder, max_num_batched_tokens=8 * block_size_of(decoder) + 1), [1, 0, 1, 0]) == expected
    assert texts(engine_of(decoder, sparse_attention=None), [0, 1]) != expected


def test_rows_read_a_part(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[torch.Tensor] = []

    def select_pages(*args: Any, **options: Any) -> Any:
        pages, lens = select(*args, **options)
        found.append(lens.flatten())
        return pages, lens

    select = ops.select_pages
    monkeypatch.setattr(ops, "select_pages", select_pages)
    alone(decoder)
    sparse = torch.cat(found).sum()
    found.clear()
    alone(decoder, sparse_attention=1.0)
    assert 0.3 < sparse / torch.cat(found).sum() < 0.95


LATENT = {
    "num_kv_heads": 1,
    "head_dim": 80,
    "rotary_dim": 16,
    "latent_attention": LatentAttentionConfig(96, 64, 32, 16, 48),
}


@pytest.mark.parametrize(
    ("changes", "limits", "message"),
    [
        ({}, {"sparse_attention": 0.0}, r"sparse_attention must be a number in \(0.0, 1.0\], got 0.0"),
        ({}, {"sparse_attention": 16}, r"sparse_attention must be a number in \(0.0, 1.0\], got 16"),
        (
            {},
            {"max_num_batched_tokens": 31},
            "max_num_batched_tokens must be at least 32, 8 blocks, with sparse_attention, got 31",
        ),
        ({}, {"tensor_parallel_size": 3}, "sparse_attention needs a KV head for each rank, got 2 for 3 ranks"),
        ({"windows": (0, 0, 8)}, {}, "sparse_attention needs layers with full attention after the first 2"),
        (LATENT, {}, "sparse_attention needs layers with full attention after the first 2"),
        ({"kv_shapes": (KVShape(2, 12),) * 3}, {}, r"needs a head_dim that is a multiple of 8, got \[12\]"),
    ],
)
def test_errors(changes: dict[str, Any], limits: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        kv_cache_size(
            EngineConfig(**{**LIMITS, "block_size": 4, "sparse_attention": SHARE, **limits}),
            [replace(mixed_decoder.CONFIG, **changes)],
        )
