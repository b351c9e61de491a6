"""Paged attention: accuracy against fp64, poisoned memory, invariances, errors.

Tolerance: the error may be at most twice that of the naive attention in the dtype of q, plus fp32's own noise.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import reference
import torch
from helpers import DTYPES, Guarded, assert_bitwise, device_fixture, per_thread_count
from torch import Tensor
from torch.nn import functional as F

from fastinfer import ops

device = device_fixture("cpu")

# (queries, cached length) of each sequence. The CPU kernel splits the cache at multiples of 512 positions.
BATCHES = {
    "decode": [(1, 1), (1, 2), (1, 17), (1, 511), (1, 512), (1, 513), (1, 1500)],
    "prefill": [(1, 1), (5, 5), (17, 17), (70, 70)],
    "chunk": [(7, 40), (33, 600), (2, 514)],
    "mixed": [(1, 100), (0, 50), (19, 19), (3, 1025), (0, 0), (1, 33)],
}
ABSURD = torch.tensor([2**30, -7], dtype=torch.int32)


@dataclass
class Batch:
    """Arguments of paged_attention. Memory that must not be read is NaN; table entries that must not be, absurd."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    query_start: Tensor

    def run(self, **options: Any) -> Tensor:
        return ops.paged_attention(**vars(self), **options)

    def expected(self, **options: Any) -> tuple[Tensor, Tensor]:
        return reference.paged_attention(**vars(self), **options)


def make_batch(
    lengths: list[tuple[int, int]],
    q_heads: int = 9,
    kv_heads: int = 3,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    device: str = "cpu",
) -> Batch:
    blocks_of = [-(-length // block_size) for _, length in lengths]
    pages = (sum(blocks_of) + 5, block_size, kv_heads, head_dim)
    k_cache, v_cache = torch.full((2, *pages), torch.nan, device=device).to(cache_dtype or dtype)
    order = torch.randperm(pages[0]).int()
    table = ABSURD.repeat(len(lengths), max(blocks_of, default=0) // 2 + 2)
    for sequence, (_, length) in enumerate(lengths):
        own, order = order[: blocks_of[sequence]], order[blocks_of[sequence] :]
        table[sequence, : len(own)] = own
        for cache in (k_cache, v_cache):
            slots = torch.full((len(own) * block_size, kv_heads, head_dim), torch.nan)
            slots[:length] = torch.randn(length, kv_heads, head_dim)
            cache[own.long()] = slots.view(-1, *pages[1:]).to(cache)
    starts = torch.tensor([0] + [count for count, _ in lengths]).cumsum(0).int()
    q = torch.randn(int(starts[-1]), q_heads, head_dim, device=device).to(dtype)
    seq_lens = torch.tensor([length for _, length in lengths], dtype=torch.int32)
    return Batch(q, k_cache, v_cache, table.to(device), seq_lens.to(device), starts.to(device))


def assert_attention(batch: Batch, **options: Any) -> None:
    lse = torch.full(batch.q.shape[:2], torch.nan, device=batch.q.device)
    out = batch.run(lse=lse, **options)
    assert out.dtype == batch.q.dtype
    exact, exact_lse = batch.expected(**options)
    naive, _ = batch.expected(**options, compute_dtype=batch.q.dtype)
    # Row by row, so that a long row's noise does not excuse a short one's error; but for a row where the naive one is
    # lucky, its mean counts.
    errors, allowed = ((o.double() - exact).abs().flatten(1).amax(1) for o in (out, naive))
    for row, error in enumerate(errors):
        limit = 2 * torch.maximum(allowed[row], allowed.mean()) + 2e-6
        assert error <= limit, f"row {row}: error {error:.3g}, twice the naive one's is {limit:.3g}"
    torch.testing.assert_close(lse.double(), exact_lse, rtol=2e-6, atol=1e-5)
    assert_bitwise(batch.run(**options), out)


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "head_dim", "block_size"),
    [
        (9, 3, 64, 16),
        (1, 1, 8, 1),
        (3, 1, 80, 32),
        (4, 4, 96, 16),
        (9, 1, 128, 64),
        (8, 2, 256, 32),
        (2, 1, 24, 5),
        (2, 1, 13, 16),
    ],
)
def test_shapes(name: str, q_heads: int, kv_heads: int, head_dim: int, block_size: int, device: str) -> None:
    assert_attention(make_batch(BATCHES[name], q_heads, kv_heads, head_dim, block_size, device=device))


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache_dtype", DTYPES)
def test_dtypes(name: str, dtype: torch.dtype, cache_dtype: torch.dtype, device: str) -> None:
    lengths = [(count, min(length, 530)) for count, length in BATCHES[name]]
    assert_attention(make_batch(lengths, 3, 1, 64, 16, dtype, cache_dtype, device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("window", [0, 1, 5, 512])
def test_options(window: int, softcap: float, sinks: bool, dtype: torch.dtype, device: str) -> None:
    batch = make_batch([(3, 1025), (1, 40), (33, 33), (0, 7), (1, 513)], 6, 2, 64, 16, dtype, device=device)
    sink_logits = torch.tensor([-3.0, 0.0, 2.0, 5.0, -torch.inf, 30.0], device=device) if sinks else None
    assert_attention(batch, window=window, softcap=softcap, sinks=sink_logits)


@pytest.mark.parametrize("scale", [0.0, 1.0, -0.3])
def test_scale(scale: float, device: str) -> None:
    """Scale 0 averages the values."""
    assert_attention(make_batch([(5, 700), (1, 3)], device=device), scale=scale)


@pytest.mark.parametrize("window", [0, 5])
def test_large_logits_do_not_overflow(window: int, device: str) -> None:
    """Logits of 900 are beyond exp's range; fp32 knows them to 2e-4, and the probabilities to as much."""
    batch = make_batch([(5, 700), (1, 3)], device=device)
    out = batch.run(scale=30.0, window=window)
    torch.testing.assert_close(out.double(), batch.expected(scale=30.0, window=window)[0], rtol=0, atol=2e-3)


@pytest.mark.parametrize("lengths", [[], [(0, 0)], [(0, 5), (0, 600)]])
def test_no_queries(lengths: list[tuple[int, int]], device: str) -> None:
    assert make_batch(lengths, device=device).run().shape == (0, 9, 64)


def test_positions_outside_every_window_are_not_read(device: str) -> None:
    """Not even multiplied by zero: their pages may have been given back."""
    batch = make_batch([(20, 600)], block_size=16, device=device)
    expected = batch.run(window=100)  # the first query, at 580, sees 481 and later
    for cache in (batch.k_cache, batch.v_cache):
        cache[batch.block_table[0, :30].long()] = torch.nan  # 0 to 479
        cache[batch.block_table[0, 30], 0] = torch.nan  # 480
    assert_bitwise(batch.run(window=100), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_queries(dtype: torch.dtype, device: str) -> None:
    batch = make_batch(BATCHES["mixed"], dtype=dtype, device=device)
    contiguous = batch.run()
    guarded = Guarded(batch.q)
    batch.q = guarded.view
    assert_bitwise(batch.run(), contiguous)
    guarded.assert_intact()


@pytest.mark.parametrize("window", [0, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whole_chunked_and_decoded_are_bitwise_equal(dtype: torch.dtype, window: int, device: str) -> None:
    """A query's row depends on its sequence alone, not on the queries or sequences that run beside it."""
    length = 530
    whole = make_batch([(length, length)], 3, 1, 64, dtype=dtype, device=device)
    expected = whole.run(window=window)
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
            assert_bitwise(rows.run(window=window), expected[begin:end])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sequence_does_not_depend_on_its_batch(dtype: torch.dtype, device: str) -> None:
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
        assert_bitwise(alone.run(), together[rows])


@pytest.mark.parametrize("name", BATCHES)
def test_threads(name: str, device: str) -> None:
    batch = make_batch(BATCHES[name], device=device)
    assert_bitwise(*per_thread_count(batch.run))


def test_shared_pages(device: str) -> None:
    """Two sequences over the same pages (a shared prefix) give what each gives alone."""
    batch = make_batch([(1, 40), (1, 40)], device=device)
    batch.block_table[1] = batch.block_table[0]
    batch.q[1] = batch.q[0]
    out = batch.run()
    assert_bitwise(out[1], out[0])


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
    "seq_lens below the queries": ("seq_lens", int32(1, 32)),
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
}


@pytest.mark.parametrize("case", BAD)
def test_errors_name_the_argument(case: str) -> None:
    arguments, value = BAD[case]
    with pytest.raises((RuntimeError, ValueError), match=rf"\b({arguments})\b"):
        ops.paged_attention(**(GOOD | {arguments.split("|")[0]: value}))
