"""Paged attention: accuracy against fp64, poisoned memory, invariances, errors.

Tolerance: the error may be at most twice that of the naive attention in the dtype of q, plus fp32's own noise.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from support import reference
from support.attention_batches import (
    BATCHES,
    QUANTIZED,
    Batch,
    QuantizedBatch,
    assert_attention,
    make_batch,
    quantized,
    with_values_in_keys,
)
from support.helpers import DTYPES, Guarded, assert_bitwise, device_fixture, per_thread_count
from torch import Tensor
from torch.nn import functional as F

from fastinfer import ops

device = device_fixture("cpu", "avx512", "cuda", "emulated")
GPUS = {
    "cuda": pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    "emulated": pytest.mark.emulated,
}
LOW = [torch.bfloat16, torch.float16]


def per_device(names: str, cpu: Sequence[Any], gpu: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize ``device`` and ``names``, with values of the CPU's and of a GPU's own: a GPU knows no fp32."""

    def values(case: Any) -> tuple[Any, ...]:
        return case if isinstance(case, tuple) else (case,)

    params = [pytest.param("cpu", *values(case)) for case in cpu]
    params += [pytest.param(gpu_name, *values(case), marks=GPUS[gpu_name]) for gpu_name in GPUS for case in gpu]
    return pytest.mark.parametrize(f"device, {names}", params, indirect=["device"])


fp32_or_bf16 = per_device("dtype", [torch.float32], [torch.bfloat16])
low_or_fp32 = per_device("dtype", [torch.float32, torch.bfloat16], LOW)

SHAPES = [
    (torch.float32, 9, 3, 64, 16),
    (torch.float32, 1, 1, 8, 1),
    (torch.float32, 3, 1, 80, 32),
    (torch.float32, 4, 4, 96, 16),
    (torch.float32, 9, 1, 128, 64),
    (torch.float32, 8, 2, 256, 32),
    (torch.float32, 4, 2, 512, 16),
    (torch.float32, 2, 1, 24, 5),
    (torch.float32, 2, 1, 13, 16),
]
GPU_SHAPES = [
    (torch.bfloat16, 9, 3, 64, 16),
    (torch.float16, 20, 1, 64, 1),
    (torch.bfloat16, 3, 1, 80, 32),
    (torch.float16, 4, 4, 96, 5),
    (torch.bfloat16, 9, 1, 128, 64),
    (torch.float16, 4, 2, 256, 128),
    (torch.bfloat16, 8, 1, 512, 16),
    (torch.float16, 6, 2, 512, 5),
]


@pytest.mark.parametrize("name", BATCHES)
@per_device("dtype, q_heads, kv_heads, head_dim, block_size", SHAPES, GPU_SHAPES)
def test_shapes(
    name: str, dtype: torch.dtype, q_heads: int, kv_heads: int, head_dim: int, block_size: int, device: str
) -> None:
    assert_attention(make_batch(BATCHES[name], q_heads, kv_heads, head_dim, block_size, dtype, device=device))


@pytest.mark.parametrize("name", BATCHES)
@per_device("dtype, cache_dtype", list(product(DTYPES, DTYPES)), [(dtype, dtype) for dtype in LOW])
def test_dtypes(name: str, dtype: torch.dtype, cache_dtype: torch.dtype, device: str) -> None:
    lengths = [(count, min(length, 530)) for count, length in BATCHES[name]]
    assert_attention(make_batch(lengths, 3, 1, 64, 16, dtype, cache_dtype, device))


@per_device("dtype", [torch.float32, torch.bfloat16], [torch.bfloat16])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("window", [0, 1, 5, 512])
def test_options(window: int, softcap: float, sinks: bool, dtype: torch.dtype, device: str) -> None:
    batch = make_batch([(3, 1025), (1, 40), (33, 33), (0, 7), (1, 513)], 6, 2, 64, 16, dtype, device=device)
    sink_logits = torch.tensor([-3.0, 0.0, 2.0, 5.0, -torch.inf, 30.0], device=device) if sinks else None
    assert_attention(batch, window=window, softcap=softcap, sinks=sink_logits)


# (queries, cached length): within the first chunk, at both sides of a chunk's end, and over several chunks.
CHUNKED_LENGTHS = [(1, 40), (1, 128), (1, 129), (3, 130), (33, 33), (70, 900), (0, 7), (1, 1025)]


@per_device(
    "dtype, q_heads, kv_heads, head_dim, block_size",
    [(torch.float32, 6, 2, 64, 16), (torch.bfloat16, 9, 1, 128, 32), (torch.float16, 1, 1, 13, 5)],
    [(torch.bfloat16, 6, 2, 64, 16), (torch.float16, 9, 1, 128, 32), (torch.bfloat16, 3, 1, 256, 5)],
)
@pytest.mark.parametrize("chunk", [0, 1, 7, 64, 128, 129, 2000])
def test_chunks(
    chunk: int, dtype: torch.dtype, q_heads: int, kv_heads: int, head_dim: int, block_size: int, device: str
) -> None:
    """A query sees its own chunk up to itself; a chunk may be longer than the text, and 0 is none."""
    batch = make_batch(CHUNKED_LENGTHS, q_heads, kv_heads, head_dim, block_size, dtype, device=device)
    assert_attention(batch, window=chunk, chunked=True)


@per_device("dtype", [torch.float32, torch.bfloat16], LOW)
def test_chunks_with_options(dtype: torch.dtype, device: str) -> None:
    options = {"softcap": 2.0, "sinks": torch.tensor([-3.0, 0.0, 2.0, 5.0, -torch.inf, 30.0], device=device)}
    batch = make_batch(CHUNKED_LENGTHS, 6, 2, 64, 16, dtype, device=device)
    assert_attention(batch, window=100, chunked=True, **options)
    assert_attention(quantized(batch, torch.int8), window=100, chunked=True, **options)


def test_chunks_with_values_in_keys() -> None:
    batch = with_values_in_keys(make_batch(CHUNKED_LENGTHS, 6, 1, 80, 16), 64)
    assert_attention(batch, window=100, chunked=True)


@pytest.mark.parametrize("queries", [1, 700])
@pytest.mark.parametrize("softcap", [0.5, 30.0, 1e3, 1e6])
def test_error_of_capped_logits(softcap: float, queries: int) -> None:
    """The lse of a query that sees one position is its logit, here an element of the query: nothing else is rounded."""
    q, k = torch.zeros(queries, 4, 64), torch.zeros(1, 1, 2, 64)
    q[..., 0], k[..., 0] = softcap * torch.randn(queries, 4), 1.0
    ragged = torch.zeros(queries, 1).int(), torch.ones(queries).int(), torch.arange(queries + 1).int()
    lse = torch.empty(queries, 4)
    ops.paged_attention(q, k, k, *ragged, scale=1.0, softcap=softcap, lse=lse)
    expected = softcap * torch.tanh(q[..., 0].double() / softcap)
    torch.testing.assert_close(lse.double(), expected, rtol=0, atol=3e-7 * softcap)


@fp32_or_bf16
@pytest.mark.parametrize("scale", [0.0, 1.0, -0.3])
def test_scale(scale: float, dtype: torch.dtype, device: str) -> None:
    """Scale 0 averages the values."""
    assert_attention(make_batch([(5, 700), (1, 3)], dtype=dtype, device=device), scale=scale)


@fp32_or_bf16
@pytest.mark.parametrize("window", [0, 5])
def test_large_logits_do_not_overflow(window: int, dtype: torch.dtype, device: str) -> None:
    """Logits of 900 are beyond exp's range; fp32 knows them to 2e-4, and the probabilities to as much."""
    batch = make_batch([(5, 700), (1, 3)], dtype=dtype, device=device)
    out = batch.run(scale=30.0, window=window)
    rounding = {"rtol": 0, "atol": 2e-3} if dtype == torch.float32 else {"rtol": 8e-3, "atol": 2e-2}
    torch.testing.assert_close(out.double(), batch.expected(scale=30.0, window=window)[0], **rounding)


@low_or_fp32
@pytest.mark.parametrize("rise", [0.4, 3.0, 40.0])
def test_maxima_that_rise(rise: float, dtype: torch.dtype, device: str) -> None:
    """From one tile of 64 positions to the next by `rise`, so that results may be relative to an old maximum."""
    batch = make_batch([(45, 700), (2, 400)], 4, 2, 128, dtype=dtype, device=device)
    batch.q[..., :2] = 1
    for sequence, length in enumerate(batch.seq_lens.tolist()):
        positions = torch.arange(length, device=device)
        pages, slots = batch.block_table[sequence, positions // 16].long(), positions % 16
        logits = rise / 64 * positions * 128**0.5
        for column, part in enumerate((logits.to(dtype), (logits - logits.to(dtype)).to(dtype))):
            batch.k_cache[pages, slots, :, column] = part[:, None]
    assert_attention(batch)


@fp32_or_bf16
@pytest.mark.parametrize("lengths", [[], [(0, 0)], [(0, 5), (0, 600)]])
def test_no_queries(lengths: list[tuple[int, int]], dtype: torch.dtype, device: str) -> None:
    assert make_batch(lengths, dtype=dtype, device=device).run().shape == (0, 9, 64)


@fp32_or_bf16
@pytest.mark.parametrize("queries", [1, 20])
def test_positions_outside_every_window_are_not_read(queries: int, dtype: torch.dtype, device: str) -> None:
    """Not even multiplied by zero: their pages may have been given back."""
    batch = make_batch([(queries, 580 + queries)], block_size=16, dtype=dtype, device=device)
    expected = batch.run(window=100)  # the first query, at 580, sees 481 and later
    for cache in (batch.k_cache, batch.v_cache):
        cache[batch.block_table[0, :30].long()] = torch.nan  # 0 to 479
        cache[batch.block_table[0, 30], 0] = torch.nan  # 480
    assert_bitwise(batch.run(window=100), expected)


@fp32_or_bf16
@pytest.mark.parametrize("queries", [1, 20])
@pytest.mark.parametrize(("chunk", "first"), [(100, 500), (496, 496), (83, 498), (512, 512)])
def test_positions_before_the_chunk_are_not_read(
    chunk: int, first: int, queries: int, dtype: torch.dtype, device: str
) -> None:
    """Of the first query, at 580 or at the chunk's first position; nor the pages before, which may have been given
    back."""
    for begin in (first, max(first, 580)):
        batch = make_batch([(queries, begin + queries)], block_size=16, dtype=dtype, device=device)
        expected = batch.run(window=chunk, chunked=True)
        for cache in (batch.k_cache, batch.v_cache):
            cache[batch.block_table[0, : first // 16].long()] = torch.nan
            cache[batch.block_table[0, first // 16], : first % 16] = torch.nan
        batch.block_table[0, : first // 16] = -7
        assert_bitwise(batch.run(window=chunk, chunked=True), expected)


@per_device("dtype", DTYPES, LOW)
def test_strided_queries(dtype: torch.dtype, device: str) -> None:
    batch = make_batch(BATCHES["mixed"], dtype=dtype, device=device)
    contiguous = batch.run()
    guarded = Guarded(batch.q)
    batch.q = guarded.view
    assert_bitwise(batch.run(), contiguous)
    guarded.assert_intact()


# What a row may differ by beside other rows: nothing on the CPU. On a GPU the batch decides where sums are cut, and so
# how probabilities are rounded.
bitwise_or_close = per_device(
    "dtype, close",
    [(dtype, {"rtol": 0, "atol": 0}) for dtype in (torch.float32, torch.bfloat16)],
    [(torch.float16, {"rtol": 2**-9, "atol": 1e-3})],
)


@pytest.mark.repeats
@bitwise_or_close
@pytest.mark.parametrize(("window", "chunked"), [(0, False), (200, False), (200, True)])
def test_whole_chunked_and_decoded_are_equal(
    dtype: torch.dtype, close: dict[str, float], window: int, chunked: bool, device: str
) -> None:
    """A query's row depends on its sequence alone, not on the queries or sequences that run beside it."""
    length = 530
    whole = make_batch([(length, length)], 3, 1, 64, dtype=dtype, device=device)
    expected = whole.run(window=window, chunked=chunked)
    for cuts in [[0, 1, 17, 300, 512, 513, 530], [0, 400, 529, 530]]:
        for begin, end in pairwise(cuts):
            rows = Batch(
                whole.q[begin:end],
                whole.k_cache,
                whole.v_cache,
                whole.block_table,
                torch.tensor([end], dtype=torch.int32, device=device),
                torch.tensor([0, end - begin], dtype=torch.int32, device=device),
            )
            torch.testing.assert_close(rows.run(window=window, chunked=chunked), expected[begin:end], **close)


@pytest.mark.repeats
@bitwise_or_close
def test_a_sequence_does_not_depend_on_its_batch(dtype: torch.dtype, close: dict[str, float], device: str) -> None:
    batch = make_batch(BATCHES["mixed"] + BATCHES["decode"], dtype=dtype, device=device)
    together = batch.run()
    starts = batch.query_start.tolist()
    for sequence in range(len(starts) - 1):
        rows = slice(starts[sequence], starts[sequence + 1])
        alone = Batch(
            batch.q[rows],
            batch.k_cache,
            batch.v_cache,
            batch.block_table[sequence : sequence + 1],
            batch.seq_lens[sequence : sequence + 1],
            torch.tensor([0, rows.stop - rows.start], dtype=torch.int32, device=device),
        )
        torch.testing.assert_close(alone.run(), together[rows], **close)


@pytest.mark.parametrize("name", [*BATCHES, "few tokens", "long"])
def test_threads(name: str) -> None:
    """Two threads cut tasks into tokens, tiles or splits, where one takes them whole."""
    lengths = BATCHES | {"few tokens": [(16, 16)], "long": [(4, 4500), (1, 9000)]}
    assert_bitwise(*per_thread_count(make_batch(lengths[name]).run))


def test_threads_of_a_long_window() -> None:
    """Its first split is not whole, and the pieces of the work are."""
    batch = make_batch([(1, 9000)])
    assert_bitwise(*per_thread_count(lambda: batch.run(window=4150)))
    assert_bitwise(*per_thread_count(lambda: batch.run(window=4150, chunked=True)))


CACHES = [torch.float16, torch.int8, torch.float8_e4m3fn]


@pytest.mark.parametrize("cache_dtype", CACHES)
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "head_dim"), [(1, 1, 64), (8, 2, 128), (7, 1, 13), (3, 1, 13), (9, 1, 80)]
)
def test_rows_decode_and_prefill_alike(q_heads: int, kv_heads: int, head_dim: int, cache_dtype: torch.dtype) -> None:
    """However many rows share a tile, and whether they read the cache itself or its copy."""
    float_cache = cache_dtype == torch.float16
    whole = make_batch([(70, 140)], q_heads, kv_heads, head_dim, cache_dtype=cache_dtype if float_cache else None)
    batch = whole if float_cache else quantized(whole, cache_dtype)
    together = batch.run()
    for rows in (slice(0, 1), slice(3, 5), slice(60, 66), slice(69, 70)):
        cut = {
            "q": batch.q[rows],
            "seq_lens": int32(70 + rows.stop),
            "query_start": int32(0, rows.stop - rows.start),
        }
        assert_bitwise(ops.paged_attention(**(vars(batch) | cut)), together[rows])


@bitwise_or_close
@pytest.mark.parametrize("window", [0, 30])
def test_each_head_has_a_length(window: int, dtype: torch.dtype, close: dict[str, float], device: str) -> None:
    """Each head's result is the one it has alone, also where some see nothing and others do."""
    lengths = [(1, 100), (0, 50), (19, 40), (3, 1025), (5, 2), (1, 33), (70, 170)]
    batch = make_batch(lengths, dtype=dtype, device=device)
    lens = (batch.seq_lens[:, None] - batch.seq_lens.new_tensor([0, 37, 15])).clamp(min=0)
    tables = batch.block_table[:, None].expand(-1, 3, -1).contiguous()
    sinks = torch.randn(9, device=device)
    lse = torch.full(batch.q.shape[:2], torch.nan, device=device)
    arguments = {"window": window, "sinks": sinks, "lse": lse}
    found = replace(batch, block_table=tables, seq_lens=lens).run(**arguments)
    for head in range(3):
        own, alone_lse = slice(3 * head, 3 * head + 3), torch.full_like(lse, torch.nan)
        alone = replace(batch, seq_lens=lens[:, head].contiguous()).run(**arguments | {"lse": alone_lse})
        torch.testing.assert_close(found[:, own], alone[:, own], **close)
        torch.testing.assert_close(lse[:, own], alone_lse[:, own], **close)


@fp32_or_bf16
def test_shared_pages(dtype: torch.dtype, device: str) -> None:
    """Two sequences over the same pages (a shared prefix) give what each gives alone."""
    batch = make_batch([(1, 40), (1, 40)], dtype=dtype, device=device)
    batch.block_table[1] = batch.block_table[0]
    batch.q[1] = batch.q[0]
    out = batch.run()
    assert_bitwise(out[1], out[0])


# (dtype, q_heads, kv_heads, head_dim, value_dim, block_size)
LATENT_SHAPES = [
    (torch.bfloat16, 20, 1, 576, 512, 16),
    (torch.bfloat16, 128, 1, 320, 256, 32),
    (torch.float32, 3, 1, 80, 64, 5),
    (torch.float32, 5, 1, 44, 24, 1),
    (torch.float16, 4, 2, 33, 7, 16),
]
GPU_LATENT_SHAPES = [
    (torch.bfloat16, 20, 1, 576, 512, 16),
    (torch.float16, 34, 1, 320, 256, 5),
    (torch.float16, 3, 1, 576, 512, 1),
    (torch.bfloat16, 6, 2, 320, 256, 64),
]


@pytest.mark.parametrize("name", BATCHES)
@per_device("dtype, q_heads, kv_heads, head_dim, value_dim, block_size", LATENT_SHAPES, GPU_LATENT_SHAPES)
def test_values_in_keys(
    name: str,
    dtype: torch.dtype,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    value_dim: int,
    block_size: int,
    device: str,
) -> None:
    """What the keys have beyond the values must not reach the output, nor what no query sees."""
    longest = 530 if dtype == torch.float32 else 200
    lengths = [(count, min(length, longest)) for count, length in BATCHES[name]]
    batch = make_batch(lengths, q_heads, kv_heads, head_dim, block_size, dtype, device=device)
    assert_attention(with_values_in_keys(batch, value_dim))


@per_device("dtype", [torch.float32], LOW)
def test_values_in_keys_with_options(dtype: torch.dtype, device: str) -> None:
    batch = with_values_in_keys(make_batch([(3, 400), (33, 33), (1, 90)], 6, 1, 320, 32, dtype, device=device), 256)
    options = {"window": 50, "softcap": 2.0, "sinks": torch.arange(6.0, device=device)}
    assert_attention(batch, **options)
    guarded = Guarded(batch.q)
    strided = ops.paged_attention(**(vars(batch) | {"q": guarded.view}), **options)
    assert_bitwise(strided, batch.run(**options))
    guarded.assert_intact()


@pytest.mark.parametrize("name", BATCHES)
def test_values_in_keys_in_vectors_of_16(name: str) -> None:
    """A cache of another dtype, as the engine has it."""
    batch = make_batch(BATCHES[name], 20, 1, 80, 16, torch.float32, torch.float16)
    assert_attention(with_values_in_keys(batch, 64))


@pytest.mark.parametrize("device", [pytest.param("emulated", marks=pytest.mark.emulated)], indirect=True)
def test_values_in_keys_that_a_gpu_refuses(device: str) -> None:
    for head_dim, value_dim in ((576, 320), (80, 64), (320, 320)):
        batch = make_batch([(1, 20)], 4, 1, head_dim, 16, torch.bfloat16, device=device)
        with pytest.raises(RuntimeError, match="paged_attention: v_cache must be the first 256 of 320 or 512 of 576"):
            with_values_in_keys(batch, value_dim).run()
    batch = with_values_in_keys(make_batch([(1, 20)], 4, 1, 320, 16, torch.bfloat16, device=device), 256)
    with pytest.raises(RuntimeError, match="paged_attention: k_cache must have the dtype of q"):
        quantized(batch, torch.int8).run()


@pytest.mark.parametrize("cache_dtype", [torch.float32, *QUANTIZED])
@pytest.mark.parametrize(("q_heads", "head_dim", "value_dim"), [(20, 80, 64), (2, 80, 64), (1, 13, 5)])
def test_values_in_keys_of_any_cache(q_heads: int, head_dim: int, value_dim: int, cache_dtype: torch.dtype) -> None:
    """Bit by bit what separate caches give, with options and in any cut of the rows."""
    batch = with_values_in_keys(make_batch([(1, 300), (6, 70), (20, 133)], q_heads, 1, head_dim), value_dim)
    batch = batch if cache_dtype == torch.float32 else quantized(batch, cache_dtype)
    options = {"window": 100, "softcap": 2.0, "sinks": torch.arange(float(q_heads))}
    assert_attention(batch, **options)
    values = batch.k_cache.clone()
    expected = ops.paged_attention(**(vars(batch) | {"v_cache": values}), **options)
    assert_bitwise(batch.run(**options), expected[..., :value_dim].contiguous())
    rows = {"q": batch.q[26:], "seq_lens": int32(133), "query_start": int32(0, 1), "block_table": batch.block_table[2:]}
    assert_bitwise(ops.paged_attention(**(vars(batch) | rows), **options), batch.run(**options)[26:])


def test_values_beside_the_keys_are_refused() -> None:
    batch = make_batch([(1, 20)], 4, 1, 64)
    wrong = {
        "of another tensor": batch.k_cache.clone()[..., :48],
        "not the first columns": batch.k_cache[..., 16:],
        "contiguous": batch.k_cache[..., :48].contiguous(),
        "more columns": torch.zeros(*batch.k_cache.shape[:3], 65),
    }
    for values in wrong.values():
        with pytest.raises(RuntimeError, match="paged_attention: v_cache must"):
            ops.paged_attention(**(vars(batch) | {"v_cache": values}))
    codes = int4(batch)
    with pytest.raises(RuntimeError, match="v_cache must be apart from k_cache"):
        ops.paged_attention(**(vars(codes) | {"v_cache": codes.k_cache[..., :16]}))
    integers = quantized(with_values_in_keys(batch, 48), torch.int8)
    with pytest.raises(RuntimeError, match="v_scale must be k_scale"):
        ops.paged_attention(**(vars(integers) | {"v_scale": integers.k_scale.clone()}))


HEAD_DIMS = [64, 80, 96, 128, 256, 512]


@low_or_fp32
@pytest.mark.parametrize("cache_dtype", QUANTIZED)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_quantized_cache(head_dim: int, cache_dtype: torch.dtype, dtype: torch.dtype, device: str) -> None:
    batch = make_batch([(1, 300), (6, 70), (1, 1), (20, 33)], 6, 2, head_dim, 16, dtype, torch.float32, device)
    assert_attention(quantized(batch, cache_dtype))


@low_or_fp32
@pytest.mark.parametrize("cache_dtype", QUANTIZED)
def test_quantized_cache_with_options(cache_dtype: torch.dtype, dtype: torch.dtype, device: str) -> None:
    batch = make_batch([(3, 400), (33, 33)], 6, 2, 64, 32, dtype, torch.float32, device)
    assert_attention(quantized(batch, cache_dtype), window=100, softcap=2.0, sinks=torch.arange(6.0, device=device))


@low_or_fp32
@pytest.mark.parametrize("cache_dtype", QUANTIZED)
def test_small_probabilities_of_quantized_values_are_kept(
    cache_dtype: torch.dtype, dtype: torch.dtype, device: str
) -> None:
    """Beside a first position that takes nearly all and is worth nothing: times a scale of 1/1000 or less the others'
    probabilities would be subnormal in fp16, and the output a tenth off."""
    batch = make_batch([(1, 40)], 1, 1, 64, 64, dtype, torch.float32, device)
    page = batch.block_table[0, 0]
    batch.q.fill_(1.0)
    batch.k_cache[page, :40] = 1e-3
    batch.k_cache[page, 0] = 8.0
    batch.v_cache[page, :40] = 0.1
    batch.v_cache[page, 0] = 1e-9
    batch = quantized(batch, cache_dtype)
    expected, _ = batch.expected(scale=1 / 64)
    torch.testing.assert_close(batch.run(scale=1 / 64).double(), expected, rtol=1e-2, atol=0)


@low_or_fp32
@pytest.mark.parametrize("cache_dtype", QUANTIZED)
def test_every_quantized_value_is_exact(cache_dtype: torch.dtype, dtype: torch.dtype, device: str) -> None:
    """A single position has the probability 1, so that its value comes out, and its logit as the lse."""
    codes = torch.arange(-128, 128).to(torch.int8)
    if cache_dtype != torch.int8:
        codes[(codes & 0x7F) == 0x7F] = 0  # NaN
    cache = codes.view(cache_dtype).view(1, 1, 1, 256).to(device)
    zero, one = torch.tensor([0, 1], device=device).int().split(1)
    ragged = {"block_table": zero[None], "seq_lens": one, "query_start": torch.cat([zero, one])}
    q = torch.randn(1, 1, 256, device=device).to(dtype)
    lse, scale = torch.empty(1, 1, device=device), torch.full((1, 1, 1), 0.5, device=device)
    out = ops.paged_attention(q, cache, cache, **ragged, k_scale=6 * scale, v_scale=scale, scale=0.25, lse=lse)
    assert_bitwise(out, cache[0].float().div(2).to(dtype))
    products = 0.75 * q.double() * cache.double()
    torch.testing.assert_close(lse.double().sum(), products.sum(), rtol=0, atol=float(1e-6 * products.abs().sum()))


@fp32_or_bf16
@pytest.mark.parametrize("cache_dtype", QUANTIZED)
def test_size_of_queries_does_not_matter_beside_a_quantized_cache(
    cache_dtype: torch.dtype, dtype: torch.dtype, device: str
) -> None:
    """On a GPU they become fp16, whose range is smaller than bf16's: each row is first divided by a power of two."""
    batch = quantized(make_batch([(1, 40), (20, 33)], 6, 2, 64, 16, dtype, torch.float32, device), cache_dtype)
    expected = batch.run(scale=0.125)
    for factor in (2.0**40, 2.0**-30):
        scaled = vars(batch) | {"q": batch.q * factor}
        assert_bitwise(ops.paged_attention(**scaled, scale=0.125 / factor), expected)


@dataclass
class Int4Batch(QuantizedBatch):
    def expected(self, **options: Any) -> tuple[Tensor, Tensor]:
        k_size, v_size = reference.INT4_GROUPS
        keys = reference.dequantize_int4(self.k_cache, self.k_scale, k_size)
        values = reference.dequantize_int4(self.v_cache, self.v_scale, v_size)
        # On a GPU the keys' products take fp16.
        caches = keys if self.q.dtype == torch.float32 else keys.half().float(), values
        ragged = (self.block_table, self.seq_lens, self.query_start)
        return reference.paged_attention(self.q, *caches, *ragged, **options)


def int4(batch: Batch) -> Int4Batch:
    """Positions that must not be read are NaN by their scales."""
    k_size, v_size = reference.INT4_GROUPS
    k_cache, k_scale = reference.quantize_int4(batch.k_cache, k_size)
    v_cache, v_scale = reference.quantize_int4(batch.v_cache, v_size)
    return Int4Batch(batch.q, k_cache, v_cache, batch.block_table, batch.seq_lens, batch.query_start, k_scale, v_scale)


INT4_LENGTHS = [(1, 300), (6, 70), (1, 1), (20, 33)]


@per_device("head_dim, dtype", [(d, torch.float32) for d in (2, 24, 34, 64, 80, 128)], list(product(HEAD_DIMS, LOW)))
def test_int4_cache(head_dim: int, dtype: torch.dtype, device: str) -> None:
    assert_attention(int4(make_batch(INT4_LENGTHS, 6, 2, head_dim, 16, dtype, torch.float32, device)))


@per_device("dtype", [torch.float32], LOW)
def test_int4_cache_with_options(dtype: torch.dtype, device: str) -> None:
    batch = int4(make_batch([(3, 400), (33, 33)], 6, 2, 64, 32, dtype, torch.float32, device))
    assert_attention(batch, window=100, softcap=2.0, sinks=torch.arange(6.0, device=device))


@per_device("dtype", [torch.float32], LOW)
def test_every_int4_value_is_exact(dtype: torch.dtype, device: str) -> None:
    """Each code in each place of a word, with a scale and a minimum of its own in every group."""
    cache = torch.randperm(256)[:128].byte().view(1, 1, 1, 128).to(device)
    keys, values = (torch.arange(count) - count // 2 for count in (16, 4))
    k_scale, v_scale = (torch.stack([2.0**n, n], -1).half().view(1, 1, 1, -1, 2).to(device) for n in (keys, values))
    zero, one = torch.tensor([0, 1], device=device).int().split(1)
    ragged = {"block_table": zero[None], "seq_lens": one, "query_start": torch.cat([zero, one])}
    q, lse = torch.randn(1, 1, 256, device=device).to(dtype), torch.empty(1, 1, device=device)
    out = ops.paged_attention(q, cache, cache, **ragged, k_scale=k_scale, v_scale=v_scale, scale=0.25, lse=lse)
    key, value = (
        reference.dequantize_int4(cache, scale, size)[0]
        for scale, size in zip((k_scale, v_scale), reference.INT4_GROUPS, strict=True)
    )
    assert_bitwise(out, value.to(dtype))
    products = 0.25 * q.double() * key.double()
    torch.testing.assert_close(lse.double().sum(), products.sum(), rtol=0, atol=float(1e-6 * products.abs().sum()))


def test_nan_in_an_int4_value_shows_to_those_that_see_it_alone() -> None:
    batch = int4(make_batch([(140, 140)], 3, 1, 128))
    for position in (0, 66, 139):
        v_scale = batch.v_scale.clone()
        v_scale[batch.block_table[0, position // 16], position % 16, 0, 1, 0] = torch.nan
        out = ops.paged_attention(**(vars(batch) | {"v_scale": v_scale}))
        seen = torch.tensor([position <= query for query in range(140)])
        assert_bitwise(out[..., 64:].isnan().all(-1).all(-1), seen)
        assert_bitwise(out[..., 64:].isnan().any(-1).any(-1), seen)
        assert out[..., :64].isfinite().all()


@fp32_or_bf16
def test_a_plan_serves_every_call_of_its_step(dtype: torch.dtype, device: str) -> None:
    """And is as it was afterwards: the third call finds what the first one found."""
    for window, chunked in ((0, False), (70, False), (70, True)):
        batch = make_batch(BATCHES["mixed"], dtype=dtype, device=device)
        plan = ops.paged_attention_plan(batch.seq_lens, batch.query_start, 9, 3, 64, window, chunked)
        expected = batch.run(window=window, chunked=chunked)
        for _ in range(3):
            assert_bitwise(batch.run(window=window, chunked=chunked, plan=plan), expected)


@low_or_fp32
def test_queries_that_see_nothing(dtype: torch.dtype, device: str) -> None:
    """A CUDA graph's unused places and padding on the left: the length is 0, or below the queries."""
    batch = make_batch([(1, 20), (1, 0), (3, 1), (20, 5)], dtype=dtype, device=device)
    lse = torch.full((25, 9), torch.nan, device=device)
    out = batch.run(lse=lse)
    blind = [1, 2, 3, *range(5, 20)]
    assert out[blind].eq(0).all()
    assert lse[blind].isneginf().all()
    alone = make_batch([(1, 20), (1, 1), (5, 5)], dtype=dtype, device=device)
    alone.q, alone.k_cache, alone.v_cache = batch.q[[0, 4, *range(20, 25)]], batch.k_cache, batch.v_cache
    alone.block_table = batch.block_table[[0, 2, 3]]
    seen = alone.run()
    torch.testing.assert_close(out[[0, 4, *range(20, 25)]], seen, rtol=2**-7, atol=4e-3)
    sinks = torch.arange(9.0, device=device)
    assert batch.run(lse=lse, sinks=sinks)[blind].eq(0).all()
    torch.testing.assert_close(lse[blind], sinks.expand(len(blind), 9))


def test_reference_is_that_of_torch() -> None:
    torch.manual_seed(0)
    batch = make_batch([(7, 40)], q_heads=6, kv_heads=2, block_size=8)
    k, v = (cache[batch.block_table[0, :5].long()].flatten(0, 1).double() for cache in (batch.k_cache, batch.v_cache))
    mask = torch.ones(7, 40, dtype=torch.bool).tril(33)
    q, k, v = (t.transpose(0, 1)[None] for t in (batch.q.double(), k, v))
    expected = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)[0].transpose(0, 1)
    torch.testing.assert_close(batch.expected()[0], expected)


@pytest.mark.parametrize("context", [1, 64, 70, 600])
def test_nan_in_a_visible_key_or_in_the_query_shows(context: int) -> None:
    """Also where it is the last number that the maximum sees, and where nothing else is visible in its tile."""

    def attend(q: Tensor, k: Tensor) -> Tensor:
        blocks = -(-context // 16)
        return ops.paged_attention(
            q, k, torch.ones_like(k), int32(*range(blocks)).view(1, -1), int32(context), int32(0, 1)
        )

    q, k = torch.randn(1, 1, 64), torch.randn(-(-context // 16), 16, 1, 64)
    assert attend(q.fill_(1.0), k).isfinite().all()
    for position in {0, context // 2, context - 1}:
        poisoned = k.clone()
        poisoned.view(-1, 64)[position] = torch.nan
        assert attend(q, poisoned).isnan().all(), position
    assert attend(torch.full_like(q, torch.nan), k).isnan().all()


@pytest.mark.parametrize("poisoned", ["k_cache", "v_cache"])
@pytest.mark.parametrize("heads", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("window", [0, 1, 40])
def test_nan_in_the_cache_shows_to_those_that_see_it_alone(window: int, heads: int, poisoned: str) -> None:
    """Not to other queries of its tile, as 0 times NaN."""
    batch = make_batch([(140, 140)], heads, 1, 64)
    for position in (0, 61, 66, 130, 139):
        cache = vars(batch)[poisoned].clone()
        cache[batch.block_table[0, position // 16], position % 16] = torch.nan
        out = ops.paged_attention(**(vars(batch) | {poisoned: cache}), window=window)
        end = position + window if window else 140
        assert_bitwise(out.isnan().all(-1).all(-1), torch.tensor([position <= query < end for query in range(140)]))
        assert_bitwise(out.isnan().any(-1).any(-1), out.isnan().all(-1).all(-1))


def test_nan_in_a_query_shows_in_its_head_alone() -> None:
    batch = make_batch([(140, 140)], 3, 1, 64)
    clean = batch.run()
    for token, head in ((0, 0), (70, 1), (139, 2)):
        q = batch.q.clone()
        q[token, head, 5] = torch.nan
        out = ops.paged_attention(**(vars(batch) | {"q": q}))
        assert out[token, head].isnan().all()
        out[token, head] = clean[token, head]
        assert_bitwise(out, clean)


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


GOOD: dict[str, Any] = {
    "q": torch.zeros(3, 4, 64),
    "k_cache": torch.zeros(5, 16, 2, 64),
    "v_cache": torch.zeros(5, 16, 2, 64),
    "block_table": int32(0, 1, 2, 3).view(2, 2),
    "seq_lens": int32(20, 32),
    "query_start": int32(0, 2, 3),
}
BAD: dict[str, tuple[str, Any]] = {
    "q dtype": ("q", torch.zeros(3, 4, 64).double()),
    "q 2-d": ("q", torch.zeros(3, 256)),
    "q heads strided": ("q", torch.zeros(3, 64, 4).transpose(1, 2)),
    "heads do not divide": ("q", torch.zeros(3, 5, 64)),
    "no heads": ("q", torch.zeros(3, 0, 64)),
    "head_dim is not the cache's": ("q|k_cache", torch.zeros(3, 4, 32)),
    "k_cache 3-d": ("k_cache", torch.zeros(5, 16, 128)),
    "k_cache strided": ("k_cache", torch.zeros(5, 2, 16, 64).transpose(1, 2)),
    "v_cache shape": ("v_cache", torch.zeros(5, 16, 1, 64)),
    "v_cache dtype": ("v_cache", torch.zeros(5, 16, 2, 64).int()),
    "block_table int64": ("block_table", torch.zeros(2, 2, dtype=torch.int64)),
    "block_table rows": ("block_table|seq_lens", int32(0, 1, 2).view(3, 1)),
    "block past the cache": ("block_table", int32(0, 5, 2, 3).view(2, 2)),
    "block negative": ("block_table", int32(0, 1, -1, 3).view(2, 2)),
    "seq_lens int64": ("seq_lens", torch.tensor([20, 32])),
    "seq_lens past the table": ("seq_lens", int32(20, 33)),
    "seq_lens negative": ("seq_lens", int32(20, -1)),
    "query_start int64": ("query_start", torch.tensor([0, 2, 3])),
    "query_start length": ("query_start", int32(0, 3)),
    "query_start end": ("query_start", int32(0, 2, 4)),
    "query_start begin": ("query_start", int32(1, 2, 3)),
    "query_start falls": ("query_start", int32(0, 5, 3)),
    "sinks dtype": ("sinks", torch.zeros(4).half()),
    "sinks length": ("sinks", torch.zeros(2)),
    "lse shape": ("lse", torch.zeros(4, 3)),
    "lse dtype": ("lse", torch.zeros(3, 4).half()),
    "window negative": ("window", -1),
    "softcap negative": ("softcap", -1.0),
    "softcap infinite": ("softcap", float("inf")),
    "softcap infinite in fp32": ("softcap", 1e39),
    "softcap whose product with log2(e) is infinite": ("softcap", 3e38),
    "softcap whose inverse is infinite": ("softcap", 1e-40),
    "softcap 0 in fp32": ("softcap", 1e-60),
    "softcap not a number": ("softcap", float("nan")),
}


@pytest.mark.parametrize("case", BAD)
def test_errors_name_the_argument(case: str) -> None:
    arguments, value = BAD[case]
    with pytest.raises((RuntimeError, ValueError), match=rf"\b({arguments})\b"):
        ops.paged_attention(**(GOOD | {arguments.split("|")[0]: value}))


HALF = {name: GOOD[name].half() for name in ("q", "k_cache", "v_cache")}
INT8 = {name: GOOD[name].to(torch.int8) for name in ("k_cache", "v_cache")}
SCALES = {name: torch.ones(5, 16, 2) for name in ("k_scale", "v_scale")}
BAD_ON_CUDA: dict[str, tuple[str, dict[str, Any]]] = {
    "fp32": ("q", GOOD),
    "head_dim": ("q", {name: t[..., :48].contiguous() for name, t in HALF.items()}),
    "cache dtype": ("k_cache", {name: GOOD[name].bfloat16() for name in ("k_cache", "v_cache")}),
    "cache alignment": ("k_cache", {"k_cache": torch.zeros(5 * 16 * 2 * 64 + 1).half()[1:].view(5, 16, 2, 64)}),
    "no scales": ("k_scale", INT8),
    "no v_scale": ("v_scale", INT8 | {"k_scale": SCALES["k_scale"]}),
    "scales of floats": ("k_scale", SCALES),
    "k_scale shape": ("k_scale", INT8 | SCALES | {"k_scale": torch.ones(5, 16)}),
    "v_scale dtype": ("v_scale", INT8 | SCALES | {"v_scale": torch.ones(5, 16, 2).half()}),
    "plan length": ("plan", {"plan": int32(1, 2, 3)}),
    "plan dtype": ("plan", {"plan": torch.zeros(84)}),
}


@per_device("case", [], list(BAD_ON_CUDA))
def test_cuda_errors_name_the_argument(case: str, device: str) -> None:
    argument, changes = BAD_ON_CUDA[case]
    arguments = {name: in_place_on(device, t) for name, t in (GOOD | HALF | changes).items()}
    with pytest.raises(RuntimeError, match=rf"\b{argument}\b"):
        ops.paged_attention(**arguments)


@per_device("dtype", [], [torch.bfloat16])
def test_a_plan_must_be_aligned_on_cuda(dtype: torch.dtype, device: str) -> None:
    batch = make_batch(BATCHES["mixed"], dtype=dtype, device=device)
    plan = ops.paged_attention_plan(batch.seq_lens, batch.query_start, 9, 3, 64)
    shifted = torch.cat([plan[:1], plan])[1:]
    with pytest.raises(RuntimeError, match="plan must be aligned to 16 bytes"):
        batch.run(plan=shifted)


def in_place_on(device: str, tensor: Tensor) -> Tensor:
    """The tensor on the device, as badly aligned as it is: ``to`` alone would copy a view to memory of its own."""
    memory = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    return memory.to(device).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


BAD_PLAN: dict[str, dict[str, Any]] = {
    "seq_lens": {"seq_lens": torch.tensor([20, 32])},
    "query_start": {"query_start": int32(0, 3)},
    "q_heads": {"q_heads": 5},
    "at most 2147483647": {"q_heads": 2**32 + 4},
    "window": {"window": -1},
}


@pytest.mark.parametrize("argument", BAD_PLAN)
def test_plan_errors_name_the_argument(argument: str) -> None:
    good = {"seq_lens": int32(20, 32), "query_start": int32(0, 2, 3), "q_heads": 4, "kv_heads": 2, "head_dim": 64}
    with pytest.raises(RuntimeError, match=rf"\b{argument}\b"):
        ops.paged_attention_plan(**(good | BAD_PLAN[argument]))


def test_caches_without_slots_are_refused() -> None:
    caches = {name: torch.zeros(5, 0, 2, 64) for name in ("k_cache", "v_cache")}
    with pytest.raises(RuntimeError, match=r"k_cache must have a block size and a head size, got \[5, 0, 2, 64\]"):
        ops.paged_attention(**(GOOD | caches))
