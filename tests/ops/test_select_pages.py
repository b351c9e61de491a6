"""The choice of pages: against fp64, poisoned where nothing may be read, and as the block table of paged attention."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from support import reference
from support.attention_batches import Batch, make_batch
from support.helpers import DTYPES, Guarded, assert_bitwise, device_fixture, per_thread_count
from torch import Tensor

from fastinfer import ops

device = device_fixture("cpu", "cuda", "emulated")
GPUS = {
    "cuda": pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    "emulated": pytest.mark.emulated,
}
# Attention on a GPU takes 16-bit floats alone.
fp32_or_bf16 = pytest.mark.parametrize(
    ("device", "dtype"),
    [("cpu", torch.float32)] + [pytest.param(name, torch.bfloat16, marks=mark) for name, mark in GPUS.items()],
    indirect=["device"],
)


def codes_of(batch: Batch) -> Tensor:
    """Codes of all keys; NaN where no token is."""
    blocks, block_size, heads, head_dim = batch.k_cache.shape
    device = batch.k_cache.device
    codes = torch.zeros(blocks, heads, head_dim // 8 + 1, block_size, dtype=torch.int32, device=device)
    ops.store_key_codes(codes, batch.k_cache, None, torch.arange(blocks * block_size, device=device))
    return codes


def ragged(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    return batch.block_table, batch.seq_lens, batch.query_start


def positions_of(batch: Batch) -> list[tuple[int, int]]:
    """Sequence and position of each token."""
    places = []
    for sequence, length in enumerate(batch.seq_lens.tolist()):
        count = int(batch.query_start[sequence + 1] - batch.query_start[sequence])
        places += [(sequence, length - count + i) for i in range(count)]
    return places


def select(*args: Any) -> tuple[Tensor, Tensor]:
    """Select pages, and write zeros behind them, where the entries are undefined."""
    (pages, lens), block_size = ops.select_pages(*args), args[5]
    return pages * (torch.arange(pages.shape[2], device=pages.device) < -(-lens // block_size)[..., None]), lens


def weights_of(q: Tensor, positions: list[int], codes: Tensor, blocks: Tensor, scale: float) -> Tensor:
    """The weights of pages for some tokens at these positions, [kv_heads, pages], in fp64; their sum is 1."""
    rotated = reference.hadamard(q)
    step = rotated.abs().amax(-1, keepdim=True) / 127
    rounded = (rotated / step).round() * step / (q.shape[-1] & -q.shape[-1])
    levels, scales = reference.key_levels(codes[blocks.long()])
    keys = (levels * scales[..., None].double()).permute(2, 0, 1, 3)  # [kv_heads, pages, block_size, head_dim]
    logits = scale * torch.einsum("nkgd,kptd->nkgpt", rounded.unflatten(1, (len(keys), -1)), keys)
    slots = torch.arange(logits[0, 0, 0].numel()).view(logits.shape[-2:])
    for row, position in zip(logits, positions, strict=True):
        row.masked_fill_(slots > position, -torch.inf)
    return logits.flatten(3).softmax(-1).view(logits.shape).sum(4).mean((0, 2))


def chosen(pages: Tensor, lens: Tensor, blocks: Tensor, block_size: int) -> list[list[int]]:
    """The numbers of the pages that each KV head has chosen."""
    places = {block: page for page, block in enumerate(blocks.tolist())}
    counts = [-(-length // block_size) for length in lens.tolist()]
    return [[places[block] for block in own[:count]] for own, count in zip(pages.tolist(), counts, strict=True)]


def assert_heaviest(own: list[int], weights: Tensor, share: float) -> None:
    """The pages are those that are read in any case and as few of the heaviest others as have the share."""
    count = len(weights)
    assert own == sorted(set(own))
    assert {0, count - 2, count - 1} <= set(own)
    assert weights[own].sum() >= share - 1e-5
    others = [page for page in own if 0 < page < count - 2]
    if others:
        least = weights[others].min()
        assert weights[own].sum() - least < share + 1e-5
        assert all(weights[page] <= 1.001 * least for page in set(range(count)) - set(own))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "head_dim", "block_size", "share"),
    [
        (9, 3, 64, 16, 0.5),
        (4, 4, 8, 3, 0.9),
        (12, 1, 80, 5, 0.7),
        (2, 1, 256, 32, 0.3),
        (1, 1, 320, 4, 0.99),
        (7, 1, 24, 8, 0.8),
        (5, 1, 96, 40, 0.6),
        (8, 2, 64, 16, 0.01),
    ],
)
def test_pages(
    q_heads: int, kv_heads: int, head_dim: int, block_size: int, share: float, dtype: torch.dtype, device: str
) -> None:
    lengths = [(1, 900), (3, 513), (1, 2), (0, 40), (2, 1500), (5, 30)]
    batch = make_batch(lengths, q_heads, kv_heads, head_dim, block_size, dtype, device=device)
    codes, q = codes_of(batch), Guarded(batch.q)
    scale = 2 * head_dim**-0.5
    pages, lens = select(q.view, codes, *ragged(batch), block_size, share, 4, scale)
    for token, (sequence, position) in enumerate(positions_of(batch)):
        count = position // block_size + 1
        blocks = batch.block_table[sequence, :count]
        if count <= 4:
            assert (lens[token] == position + 1).all()
            assert (pages[token, :, :count] == blocks).all()
            continue
        weights = weights_of(batch.q[token : token + 1], [position], codes, blocks, scale)
        for head, own in enumerate(chosen(pages[token], lens[token], blocks, block_size)):
            assert not pages[token, head, len(own) :].any()
            assert lens[token, head] == (len(own) - 1) * block_size + position % block_size + 1
            assert_heaviest(own, weights[head].cpu(), share)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("q_heads", "kv_heads", "block_size"), [(9, 3, 16), (4, 4, 3), (12, 1, 32)])
def test_rows_of_several_tokens(q_heads: int, kv_heads: int, block_size: int, dtype: torch.dtype) -> None:
    """The last token of each row is looked at, and every fourth before it; rows may be empty."""
    torch.manual_seed(0)
    batch = make_batch([(1, 700), (40, 513), (0, 9), (33, 33)], q_heads, kv_heads, 64, block_size, dtype)
    codes, places, scale = codes_of(batch), positions_of(batch), 0.3
    ends = [end for end in range(1, 75) if end in (1, 41, 74) or (places[end - 1][1] + 1) % block_size == 0]
    row_start = torch.tensor([0, 0, *ends, 74, 74], dtype=torch.int32)
    # A NaN in a query that nobody looks at.
    q, looked_at = batch.q.clone(), [range(end - 1, begin - 1, -4) for begin, end in pairwise(row_start.tolist())]
    q[list(set(range(74)) - {token for row in looked_at for token in row})] = torch.nan
    pages, lens = select(q, codes, *ragged(batch), block_size, 0.6, 0, scale, row_start)
    assert pages.shape == (len(row_start) - 1, kv_heads, batch.block_table.shape[1])
    assert not lens[[0, -2, -1]].any()
    assert not pages[[0, -2, -1]].any()
    for row, tokens in enumerate(looked_at):
        if not tokens:
            continue
        sequence, position = places[tokens[0]]
        count = position // block_size + 1
        blocks = batch.block_table[sequence, :count]
        if count <= 3:
            assert (lens[row] == position + 1).all()
            continue
        own_positions = [places[token][1] for token in tokens]
        weights = weights_of(q[list(tokens)], own_positions, codes, blocks, scale)
        for head, own in enumerate(chosen(pages[row], lens[row], blocks, block_size)):
            assert_heaviest(own, weights[head], 0.6)


def rows_of(batch: Batch) -> Tensor:
    """``query_start`` where each token is a sequence of its own."""
    return torch.arange(len(batch.q) + 1, dtype=torch.int32, device=batch.q.device)


@fp32_or_bf16
@pytest.mark.repeats
def test_attention_to_all_pages_is_dense_bit_by_bit(device: str, dtype: torch.dtype) -> None:
    batch = make_batch([(1, 900), (1, 513), (1, 1), (1, 64)], dtype=dtype, device=device)
    dense = batch.run()
    for share, num_dense_pages in ((1.0, 0), (0.1, 57)):
        pages, lens = ops.select_pages(batch.q, codes_of(batch), *ragged(batch), 16, share, num_dense_pages)
        assert_bitwise(ops.paged_attention(batch.q, batch.k_cache, batch.v_cache, pages, lens, rows_of(batch)), dense)


def test_rows_that_attend_to_all_pages_are_dense_bit_by_bit() -> None:
    """On the CPU, where a row does not depend on others."""
    torch.manual_seed(0)
    batch = make_batch([(1, 900), (3, 513), (1, 1), (60, 64)])
    for row_start in (rows_of(batch), torch.tensor([0, 1, 4, 5, 17, 33, 49, 65], dtype=torch.int32)):
        pages, lens = ops.select_pages(batch.q, codes_of(batch), *ragged(batch), 16, 1.0, row_start=row_start)
        sparse = ops.paged_attention(batch.q, batch.k_cache, batch.v_cache, pages, lens, row_start)
        assert_bitwise(sparse, batch.run())


@fp32_or_bf16
def test_attention_to_chosen_pages(device: str, dtype: torch.dtype) -> None:
    """The result is that of dense attention of each KV head to a cache with its pages alone; the rest is NaN."""
    batch = make_batch([(1, 900), (20, 513)], dtype=dtype, device=device)
    rows = rows_of(batch)
    row_start = torch.tensor([0, 1, 5, 21], dtype=torch.int32) if dtype == torch.float32 else None
    rows = rows if row_start is None else row_start
    pages, lens = ops.select_pages(batch.q, codes_of(batch), *ragged(batch), 16, 0.6, 0, 0.3, row_start)
    assert len(set(lens[0].tolist())) > 1
    found = ops.paged_attention(batch.q, batch.k_cache, batch.v_cache, pages, lens, rows)
    # The batch decides on a GPU where sums are cut, and so how probabilities are rounded.
    close = {"rtol": 0, "atol": 0} if dtype == torch.float32 else {"rtol": 2**-9, "atol": 2e-3}
    for row, (begin, end) in enumerate(pairwise(rows.tolist())):
        for head in range(3):
            own_pages = pages[row, head, : -(-int(lens[row, head]) // 16)].long()
            caches = [torch.full_like(cache, torch.nan) for cache in (batch.k_cache, batch.v_cache)]
            for cache, of in zip(caches, (batch.k_cache, batch.v_cache), strict=True):
                cache[own_pages, :, head] = of[own_pages, :, head]
            own = slice(3 * head, 3 * head + 3)
            one = lens[row, head : head + 1].contiguous(), rows.new_tensor([0, end - begin])
            heads = [cache[:, :, head : head + 1].contiguous() for cache in caches]
            alone = ops.paged_attention(batch.q[begin:end, own], *heads, pages[row, head][None], *one)
            torch.testing.assert_close(found[begin:end, own], alone, **close)


@pytest.mark.repeats
def test_a_token_does_not_depend_on_the_others(device: str) -> None:
    batch = make_batch([(1, 900), (3, 513), (4, 700)], device=device)
    codes = codes_of(batch)
    pages, lens = select(batch.q, codes, *ragged(batch), 16, 0.6)
    for token, (sequence, position) in enumerate(positions_of(batch)):
        own = (torch.tensor(numbers, dtype=torch.int32, device=device) for numbers in ([position + 1], [0, 1]))
        q, row = batch.q[token : token + 1], batch.block_table[sequence : sequence + 1].contiguous()
        alone, lengths = select(q, codes, row, *own, 16, 0.6)
        assert_bitwise(alone[0], pages[token])
        assert_bitwise(lengths[0], lens[token])
    first, _ = select(batch.q[:3], codes, *ragged(batch), 16, 0.6)  # the first of the queries
    assert_bitwise(first, pages[:3])


def test_threads() -> None:
    torch.manual_seed(0)
    batch = make_batch([(1, 900), (3, 513), (4, 700)])
    codes = codes_of(batch)
    assert_bitwise(*per_thread_count(lambda: select(batch.q, codes, *ragged(batch), 16, 0.6)[0]))


def test_queries_that_see_nothing(device: str) -> None:
    """The first queries of a sequence have no pages if it has more queries than positions."""
    batch = make_batch([(5, 2), (1, 20)], device=device)
    _, lens = select(batch.q, codes_of(batch), *ragged(batch), 16, 0.9)
    assert lens.tolist() == [[length] * 3 for length in (0, 0, 0, 1, 2, 20)]


@pytest.mark.parametrize("device", [pytest.param(name, marks=mark) for name, mark in GPUS.items()], indirect=True)
def test_padding_of_a_recorded_step_reads_nothing(device: str) -> None:
    """Its tokens are behind those of all sequences, and its sequences have none."""
    batch = make_batch([(1, 900), (1, 513)], dtype=torch.bfloat16, device=device)
    codes = codes_of(batch)
    expected, lens = select(batch.q, codes, *ragged(batch), 16, 0.6)
    table = torch.full((4, batch.block_table.shape[1]), 2**30, dtype=torch.int32, device=device)
    table[:2] = batch.block_table
    ragged_lens = (
        torch.tensor(numbers, dtype=torch.int32, device=device) for numbers in ([900, 513, 0, 0], [0, 1, 2, 2, 2])
    )
    q = torch.cat([batch.q, torch.full_like(batch.q, torch.nan)])
    pages, padded_lens = select(q, codes, table, *ragged_lens, 16, 0.6)
    assert_bitwise(pages[:2], expected)
    assert padded_lens.tolist() == [*lens.tolist(), [0] * 3, [0] * 3]
    out = ops.paged_attention(
        q, batch.k_cache, batch.v_cache, pages, padded_lens, rows_of(batch)[:1].new_tensor(range(5))
    )
    assert (out[2:] == 0).all()


@pytest.mark.parametrize("device", [pytest.param(name, marks=mark) for name, mark in GPUS.items()], indirect=True)
def test_a_length_beyond_the_block_table_changes_nothing_else(device: str) -> None:
    """The CPU refuses it. On a GPU the token itself gets pages of its row of the table."""
    batch = make_batch([(1, 900), (1, 513)], dtype=torch.bfloat16, device=device)
    codes = codes_of(batch)
    expected, _ = select(batch.q, codes, *ragged(batch), 16, 0.6)
    table = batch.block_table.clamp(0, len(batch.k_cache) - 1)  # its second row has no blocks behind the 33rd
    lengths = batch.seq_lens + batch.seq_lens.new_tensor([0, 9000])
    pages, _ = select(batch.q, codes, table, lengths, batch.query_start, 16, 0.6)
    assert_bitwise(pages[0], expected[0])
    assert set(pages[1].flatten().tolist()) <= {0, *table[1].tolist()}


def test_equal_estimates_and_what_is_not_finite(device: str) -> None:
    table, lengths, start = (
        torch.tensor(numbers, dtype=torch.int32, device=device) for numbers in ([range(9)], [9], [0, 1])
    )
    keys, codes = torch.zeros(9, 1, 1, 8, device=device), torch.zeros(9, 1, 2, 1, dtype=torch.int32, device=device)
    q = torch.ones(1, 2, 8, device=device)

    def pages_for(share: float) -> list[int]:
        ops.store_key_codes(codes, keys, None, torch.arange(9, device=device))
        pages, lens = select(q, codes, table, lengths, start, 1, share)
        return pages.flatten()[: int(lens)].tolist()

    assert pages_for(0.33) == [0, 7, 8]
    assert pages_for(0.34) == [0, 1, 2, 3, 4, 5, 6, 7, 8]  # of equal weights all are taken
    keys[4, 0, 0, 3] = 1.0
    assert pages_for(0.45) == [0, 4, 7, 8]
    keys[6, 0, 0, 3] = torch.inf
    assert pages_for(0.45) == [0, 4, 6, 7, 8]
    keys[5, 0, 0, 2] = torch.nan
    assert pages_for(0.45) == [0, 4, 5, 6, 7, 8]
    keys[[0, 7, 8]] = torch.nan  # these are read in any case
    assert pages_for(0.2) == [0, 4, 5, 6, 7, 8]
    q[0, 1, 3] = torch.nan
    assert pages_for(0.2) == [0, 1, 2, 3, 4, 5, 6, 7, 8]


def test_a_channel_that_is_much_larger_hides_no_other(device: str) -> None:
    """Without the rotation the other channels of these keys would all be rounded to the smallest level."""
    torch.manual_seed(0)
    keys = torch.randn(40, 4, 1, 64)
    keys[..., 7] = 20.0
    q = 3 * torch.randn(1, 1, 64)
    q[..., 7] = 0.1
    exact = (torch.einsum("hd,ptkd->pt", q[0], keys) / 8).logsumexp(1)
    wanted = set(exact[1:-2].topk(5).indices.add(1).tolist())
    keys, q = keys.to(device), q.to(device)
    codes = torch.zeros(40, 1, 9, 4, dtype=torch.int32, device=device)
    ops.store_key_codes(codes, keys, None, torch.arange(160, device=device))
    ragged = (torch.tensor(numbers, dtype=torch.int32, device=device) for numbers in ([range(40)], [160], [0, 1]))
    pages, lens = select(q, codes, *ragged, 4, 0.9)
    own = pages.flatten()[: int(lens) // 4].tolist()
    assert len(own) < 20
    assert len(wanted & set(own)) >= 4


ROWS = {"block_size": 4, "seq_lens": torch.tensor([24, 3]).int(), "query_start": torch.tensor([0, 7, 9]).int()}
ROWS |= {"q": torch.zeros(9, 4, 8), "block_table": torch.arange(12).int().view(2, 6)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 4, 12)}, "q must have a head_dim that is a multiple of 8, got 12"),
        ({"q": torch.zeros(2, 3, 8)}, "q must have a multiple of codes' 2 heads, got 3"),
        ({"codes": torch.zeros(9, 2, 2, 4)}, "codes must be int32"),
        ({"codes": torch.zeros(9, 2, 2, 8).int()}, "codes must have the shape"),
        ({"share": 0.0}, "share must be above 0 and at most 1, got 0"),
        ({"share": 1.5}, "share must be above 0 and at most 1, got 1.5"),
        ({"share": math.nan}, "share must be above 0 and at most 1, got nan"),
        ({"num_dense_pages": -1}, "num_dense_pages must be in 0..2147483647, got -1"),
        ({"block_size": 0}, "block_size must be positive and at most 2147483647, got 0"),
        ({"block_size": 2**32 + 4}, "block_size must be positive and at most 2147483647, got 4294967300"),
        ({"seq_lens": torch.tensor([25]).int()}, r"seq_lens\[0\] must be in 0..24 \(its blocks\), got 25"),
        ({"query_start": torch.tensor([0, 1]).int()}, "query_start must run from 0 to at least the number of tokens"),
        ({"block_table": torch.full((1, 6), 9).int()}, "block_table must have blocks in 0..8, got 9"),
        (
            ROWS | {"row_start": torch.tensor([0, 4, 10]).int()},
            "must not decrease within 0..9, got 4 before 10",
        ),
        (ROWS | {"row_start": torch.tensor([4, 0]).int()}, "row_start must not decrease within 0..9, got 4 before 0"),
        (ROWS | {"row_start": torch.tensor([0, 5]).int()}, r"a row must have at most 4 tokens \(a block\), got 5"),
        (
            ROWS | {"row_start": torch.tensor([4, 8]).int()},
            r"a row must have tokens of one sequence, got 4..7, of which 7 belongs to the next",
        ),
        (ROWS | {"row_start": torch.tensor([4, 7])}, "row_start must be int32"),
        (ROWS | {"row_start": torch.zeros(0).int()}, "row_start must have a start and an end"),
    ],
)
def test_errors(change: dict[str, Tensor | int], message: str) -> None:
    call = {
        "q": torch.zeros(2, 4, 8),
        "codes": torch.zeros(9, 2, 2, 4).int(),
        "block_table": torch.arange(6).int()[None],
        "seq_lens": torch.tensor([24]).int(),
        "query_start": torch.tensor([0, 2]).int(),
        "block_size": 4,
        "share": 0.9,
    }
    with pytest.raises(RuntimeError, match=message):
        ops.select_pages(**(call | change))
