"""Attention of prompts in bf16: as this machine computes it, and in tiles in software, in a process of its own."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from support import reference
from support.attention_batches import (
    BATCHES,
    QUANTIZED,
    Batch,
    QuantizedBatch,
    make_batch,
    quantized,
    with_values_in_keys,
)
from support.helpers import assert_bitwise, per_thread_count
from support.tiles import attention_in_bf16, run_in_software
from torch import Tensor

from fastinfer import ops

TILE = 64  # positions whose probabilities are relative to one maximum


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.slow
def test_in_software() -> None:
    run_in_software(__file__)


def as_prompt(batch: Batch, **options: Any) -> Tensor:
    with ops.prompt_rows(0):
        return batch.run(**options)


def in_tiles_slowly(
    batch: Batch,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    scale: float | None = None,
    chunked: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention and its lse in fp64, with the probabilities of each tile rounded to bf16; keys and values must be."""
    group = batch.q.shape[1] // batch.k_cache.shape[2]
    scale = batch.q.shape[2] ** -0.5 if scale is None else scale
    outs, lses = [], []
    for sequence, (begin, end) in enumerate(pairwise(batch.query_start.tolist())):
        length, blocks = int(batch.seq_lens[sequence]), batch.block_table[sequence].tolist()
        blocks = blocks[: -(-length // batch.k_cache.shape[1])]
        keys, values = (cache[blocks].flatten(0, 1)[:length].double() for cache in (batch.k_cache, batch.v_cache))
        for token in range(begin, end):
            position = length - end + token
            seen = torch.arange(length) <= position
            if window:
                seen &= torch.arange(length) >= position - (position % window if chunked else window - 1)
            for head, q in enumerate(batch.q[token].double()):
                logits = keys[:, head // group] @ q * scale
                if softcap:
                    logits = softcap * (logits / softcap).tanh()
                logits = logits.masked_fill(~seen, -torch.inf)
                largest = logits.max() if sinks is None else torch.maximum(logits.max(), sinks[head].double())
                total = torch.zeros(()).double() if sinks is None else (sinks[head].double() - largest).exp()
                out = torch.zeros_like(q)
                for part, rows in zip(logits.split(TILE), values[:, head // group].split(TILE), strict=True):
                    if part.isneginf().all():
                        continue
                    factor = (part.max() - largest).exp()
                    probabilities = (part - part.max()).exp()
                    total = total + factor * probabilities.sum()
                    out = out + factor * (probabilities.bfloat16().double() @ rows)
                outs.append(out / total)
                lses.append(largest + total.log())
    shape = batch.q.shape
    return torch.stack(outs).view(shape), torch.stack(lses).view(shape[:2])


def assert_as_slowly(batch: Batch, **options: Any) -> None:
    """One probability in some thousands is so near to the middle that fp32 rounds it the other way."""
    lse = torch.full(batch.q.shape[:2], torch.nan)
    out = as_prompt(batch, lse=lse, **options)
    expected, expected_lse = in_tiles_slowly(batch, **options)
    error = (out.double() - expected).abs()
    assert error.max() < 4e-3
    assert error.mean() < 1e-5
    torch.testing.assert_close(lse.double(), expected_lse, rtol=2e-6, atol=1e-5)


def bfloat16_batch(lengths: list[tuple[int, int]], *shape: int) -> Batch:
    """Tiles round to bf16; the queries, and so the result, are fp32."""
    batch = make_batch(lengths, *shape, cache_dtype=torch.bfloat16)
    batch.q = batch.q.bfloat16().float()
    return batch


@attention_in_bf16
@pytest.mark.parametrize("name", ["prefill", "chunk"])
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "head_dim", "block_size"), [(9, 3, 64, 16), (2, 1, 13, 5), (3, 1, 80, 32), (6, 1, 128, 64)]
)
def test_shapes(name: str, q_heads: int, kv_heads: int, head_dim: int, block_size: int) -> None:
    assert_as_slowly(bfloat16_batch(BATCHES[name], q_heads, kv_heads, head_dim, block_size))


@attention_in_bf16
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("window", [0, 1, 5, 100])
def test_options(window: int, softcap: float) -> None:
    batch = bfloat16_batch([(3, 300), (1, 40), (33, 33), (40, 200)], 6, 2, 64)
    assert_as_slowly(batch, window=window, softcap=softcap)
    sinks = torch.tensor([-3.0, 0.0, 2.0, 5.0, -torch.inf, 30.0])
    assert_as_slowly(batch, window=window, softcap=softcap, sinks=sinks, scale=-0.3)


@attention_in_bf16
@pytest.mark.parametrize("chunk", [1, 7, 64, 100])
def test_chunks(chunk: int) -> None:
    """Rows of several chunks in one tile, and of one chunk in several."""
    batch = bfloat16_batch([(3, 130), (33, 33), (70, 200)], 6, 2, 64)
    assert_as_slowly(batch, window=chunk, chunked=True)


def assert_near(out: Tensor, expected: Tensor) -> None:
    error = (out.double() - expected).abs()
    assert error.max() < 0.03
    assert error.mean() < 0.003


@attention_in_bf16
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    batch = make_batch(BATCHES["mixed"], 6, 2, 80, 16, dtype, cache_dtype)
    assert_near(as_prompt(batch), batch.expected()[0])


@attention_in_bf16
@pytest.mark.parametrize("cache_dtype", QUANTIZED)
def test_quantized_caches(cache_dtype: torch.dtype) -> None:
    batch = quantized(make_batch(BATCHES["chunk"], 6, 2, 64), cache_dtype)
    for options in ({}, {"window": 40, "softcap": 5.0}):
        assert_near(as_prompt(batch, **options), batch.expected(**options)[0])


@attention_in_bf16
@pytest.mark.parametrize("cache_dtype", [torch.float32, *QUANTIZED])
@pytest.mark.parametrize(("q_heads", "head_dim", "value_dim"), [(20, 80, 64), (3, 44, 24)])
def test_values_in_keys(q_heads: int, head_dim: int, value_dim: int, cache_dtype: torch.dtype) -> None:
    """Bit by bit what separate caches give."""
    batch = with_values_in_keys(make_batch(BATCHES["mixed"], q_heads, 1, head_dim), value_dim)
    batch = batch if cache_dtype == torch.float32 else quantized(batch, cache_dtype)
    assert_near(as_prompt(batch), batch.expected()[0])
    apart = replace(batch, v_cache=batch.k_cache.clone())
    assert_bitwise(as_prompt(batch), as_prompt(apart)[..., :value_dim].contiguous())


@attention_in_bf16
def test_int4_cache() -> None:
    batch = make_batch(BATCHES["mixed"], 6, 2, 80)
    k_size, v_size = reference.INT4_GROUPS
    k_cache, k_scale = reference.quantize_int4(batch.k_cache, k_size)
    v_cache, v_scale = reference.quantize_int4(batch.v_cache, v_size)
    ragged = (batch.block_table, batch.seq_lens, batch.query_start)
    dense = reference.dequantize_int4(k_cache, k_scale, k_size), reference.dequantize_int4(v_cache, v_scale, v_size)
    out = as_prompt(QuantizedBatch(batch.q, k_cache, v_cache, *ragged, k_scale, v_scale))
    assert_near(out, reference.paged_attention(batch.q, *dense, *ragged)[0])


@attention_in_bf16
@pytest.mark.parametrize(("window", "chunked"), [(0, False), (200, False), (200, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_query_does_not_depend_on_its_chunk(dtype: torch.dtype, window: int, chunked: bool) -> None:
    length = 530
    whole = make_batch([(length, length)], 6, 2, 64, dtype=dtype)
    expected = as_prompt(whole, window=window, chunked=chunked)
    for cuts in [[0, 1, 17, 300, 512, 513, 530], [0, 400, 529, 530]]:
        for begin, end in pairwise(cuts):
            lengths = torch.tensor([end], dtype=torch.int32), torch.tensor([0, end - begin], dtype=torch.int32)
            chunk = Batch(whole.q[begin:end], whole.k_cache, whole.v_cache, whole.block_table, *lengths)
            assert_bitwise(as_prompt(chunk, window=window, chunked=chunked), expected[begin:end])


@attention_in_bf16
def test_a_query_does_not_depend_on_its_batch_or_the_threads() -> None:
    batch = make_batch(BATCHES["mixed"] + BATCHES["chunk"] + [(4, 4500)])
    together, by_two = per_thread_count(lambda: as_prompt(batch))
    assert_bitwise(together, by_two)
    for sequence, (begin, end) in enumerate(pairwise(batch.query_start.tolist())):
        table, lengths = (rows[sequence : sequence + 1] for rows in (batch.block_table, batch.seq_lens))
        start = torch.tensor([0, end - begin], dtype=torch.int32)
        alone = Batch(batch.q[begin:end], batch.k_cache, batch.v_cache, table, lengths, start)
        assert_bitwise(as_prompt(alone), together[begin:end])


@attention_in_bf16
def test_queries_before_the_first_are_as_without() -> None:
    """Also where the first lies within a sequence, and among queries that see nothing."""
    batch = make_batch([(1, 70), (1, 600), (20, 5), (40, 90), (0, 9), (30, 30)])
    lse, prompt_lse, mixed_lse = torch.full((3, len(batch.q), 9), torch.nan)
    without, prompt = batch.run(lse=lse), as_prompt(batch, lse=prompt_lse)
    seen = torch.tensor([True] * 2 + [False] * 15 + [True] * 75)
    assert_bitwise((prompt == without).flatten(1).all(1), ~seen)
    for first in (1, 2, 10, 22, 40, 62, 91, 92, 1000):
        with ops.prompt_rows(first):
            out = batch.run(lse=mixed_lse.fill_(torch.nan))
        assert_bitwise(out, torch.cat([without[:first], prompt[first:]]))
        assert_bitwise(mixed_lse, torch.cat([lse[:first], prompt_lse[first:]]))


@attention_in_bf16
@pytest.mark.parametrize("window", [0, 1, 40])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -3.4e38])
def test_what_is_not_finite_shows_to_those_that_see_it_alone(value: float, window: int) -> None:
    """Not to other queries of its tile, as 0 times NaN, nor to other columns. -3.4e38 is infinite as bf16."""
    batch = make_batch([(140, 140)], 4, 1, 64)
    clean = as_prompt(batch, window=window)
    for position in (0, 1, 61, 66, 130, 139):
        cache = batch.v_cache.clone()
        cache[batch.block_table[0, position // 16], position % 16, 0, 5] = value
        out = as_prompt(Batch(**(vars(batch) | {"v_cache": cache})), window=window)
        end = position + window if window else 140
        seeing = torch.tensor([position <= query < end for query in range(140)])
        assert_bitwise(out[..., 5].isfinite().logical_not().all(-1), seeing)
        assert_bitwise(out[..., 5].isfinite().logical_not().any(-1), seeing)
        out[..., 5] = clean[..., 5].where(seeing[:, None], out[..., 5])
        assert_bitwise(out, clean)


@attention_in_bf16
def test_nan_in_a_key_or_a_query_shows_to_its_rows_alone() -> None:
    batch = make_batch([(140, 140)], 4, 1, 64)
    clean = as_prompt(batch)
    k_cache = batch.k_cache.clone()
    k_cache[batch.block_table[0, 4], 2] = torch.nan  # position 66
    out = as_prompt(Batch(**(vars(batch) | {"k_cache": k_cache})))
    assert out[66:].isnan().all()
    assert_bitwise(out[:66], clean[:66])
    q = batch.q.clone()
    q[70, 1, 5] = torch.nan
    out = as_prompt(Batch(**(vars(batch) | {"q": q})))
    assert out[70, 1].isnan().all()
    out[70, 1] = clean[70, 1]
    assert_bitwise(out, clean)
