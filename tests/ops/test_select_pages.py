"""The choice of pages: against fp64, poisoned where nothing may be read, and as the block table of paged attention."""

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


def weights_of(q: Tensor, codes: Tensor, blocks: Tensor, scale: float) -> Tensor:
    """The weights of pages for one token, [kv_heads, pages], in fp64."""
    rotated = reference.hadamard(q)
    step = rotated.abs().amax(-1, keepdim=True) / 127
    rounded = (rotated / step).round() * step / (q.shape[-1] & -q.shape[-1])
    levels, scales = reference.key_levels(codes[blocks.long()])
    keys = (levels * scales[..., None].double()).permute(2, 0, 1, 3)  # [kv_heads, pages, block_size, head_dim]
    logits = torch.einsum("kgd,kptd->kgpt", rounded.unflatten(0, (len(keys), -1)), keys)
    return (scale * logits).flatten(2).softmax(-1).view(logits.shape).sum((1, 3))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "head_dim", "block_size", "num_pages"),
    [
        (9, 3, 64, 16, 10),
        (4, 4, 8, 3, 4),
        (12, 1, 80, 5, 33),
        (2, 1, 256, 32, 6),
        (1, 1, 320, 4, 9),
        (7, 1, 24, 8, 7),
        (5, 1, 96, 40, 5),
    ],
)
def test_pages(
    q_heads: int, kv_heads: int, head_dim: int, block_size: int, num_pages: int, dtype: torch.dtype, device: str
) -> None:
    lengths = [(1, 900), (3, 513), (1, 2), (0, 40), (2, 1500), (5, 30)]
    batch = make_batch(lengths, q_heads, kv_heads, head_dim, block_size, dtype, device=device)
    codes, q = codes_of(batch), Guarded(batch.q)
    scale = 0.5 * head_dim**-0.5
    pages, lens = ops.select_pages(q.view, codes, *ragged(batch), block_size, num_pages, scale)
    for token, (sequence, position) in enumerate(positions_of(batch)):
        count = position // block_size + 1
        blocks = batch.block_table[sequence, :count]
        if count <= num_pages:
            assert lens[token] == position + 1
            assert (pages[token, :, :count] == blocks).all()
            continue
        assert lens[token] == (num_pages - 1) * block_size + position % block_size + 1
        weights = weights_of(batch.q[token], codes, blocks[1:-2], scale)
        for head in range(kv_heads):
            chosen = [blocks.tolist().index(page) for page in pages[token, head].tolist()]
            assert chosen == sorted(set(chosen))
            assert {0, count - 2, count - 1} <= set(chosen)
            middle = [page - 1 for page in chosen if 0 < page < count - 2]
            least = weights[head, middle].min()
            others = [page for page in range(count - 3) if page not in middle]
            assert all(weights[head, page] <= 1.001 * least for page in others)


def rows_of(batch: Batch) -> Tensor:
    """``query_start`` where each token is a sequence of its own."""
    return torch.arange(len(batch.q) + 1, dtype=torch.int32, device=batch.q.device)


@fp32_or_bf16
@pytest.mark.repeats
def test_attention_to_all_pages_is_dense_bit_by_bit(device: str, dtype: torch.dtype) -> None:
    batch = make_batch([(1, 900), (1, 513), (1, 1), (1, 64)], dtype=dtype, device=device)
    dense = batch.run()
    for num_pages in (57, 1000):
        pages, lens = ops.select_pages(batch.q, codes_of(batch), *ragged(batch), 16, num_pages)
        assert_bitwise(ops.paged_attention(batch.q, batch.k_cache, batch.v_cache, pages, lens, rows_of(batch)), dense)


def test_drafts_that_attend_to_all_pages_are_dense_bit_by_bit() -> None:
    """On the CPU, where a row does not depend on others."""
    torch.manual_seed(0)
    batch = make_batch([(1, 900), (3, 513), (1, 1), (2, 64)])
    pages, lens = ops.select_pages(batch.q, codes_of(batch), *ragged(batch), 16, 57)
    sparse = ops.paged_attention(batch.q, batch.k_cache, batch.v_cache, pages, lens, rows_of(batch))
    assert_bitwise(sparse, batch.run())


@fp32_or_bf16
def test_attention_to_chosen_pages(device: str, dtype: torch.dtype) -> None:
    """The result is that of dense attention of each KV head to a cache with its pages alone; the rest is NaN."""
    batch = make_batch([(1, 900), (2, 513)], dtype=dtype, device=device)
    pages, lens = ops.select_pages(batch.q, codes_of(batch), *ragged(batch), 16, 8)
    found = ops.paged_attention(batch.q, batch.k_cache, batch.v_cache, pages, lens, rows_of(batch))
    # The batch decides on a GPU where sums are cut, and so how probabilities are rounded.
    close = {"rtol": 0, "atol": 0} if dtype == torch.float32 else {"rtol": 2**-9, "atol": 1e-3}
    for token in range(len(batch.q)):
        for head in range(3):
            caches = [torch.full_like(cache, torch.nan) for cache in (batch.k_cache, batch.v_cache)]
            for cache, of in zip(caches, (batch.k_cache, batch.v_cache), strict=True):
                cache[pages[token, head].long(), :, head] = of[pages[token, head].long(), :, head]
            own = slice(3 * head, 3 * head + 3)
            one = lens[token : token + 1], rows_of(batch)[:2]
            heads = [cache[:, :, head : head + 1].contiguous() for cache in caches]
            alone = ops.paged_attention(batch.q[token : token + 1, own], *heads, pages[token, head][None], *one)
            torch.testing.assert_close(found[token, own], alone[0], **close)


@pytest.mark.repeats
def test_a_token_does_not_depend_on_the_others(device: str) -> None:
    batch = make_batch([(1, 900), (3, 513), (4, 700)], device=device)
    codes = codes_of(batch)
    pages, lens = ops.select_pages(batch.q, codes, *ragged(batch), 16, 8)
    for token, (sequence, position) in enumerate(positions_of(batch)):
        own = (torch.tensor(numbers, dtype=torch.int32, device=device) for numbers in ([position + 1], [0, 1]))
        q, row = batch.q[token : token + 1], batch.block_table[sequence : sequence + 1].contiguous()
        alone, length = ops.select_pages(q, codes, row, *own, 16, 8)
        assert_bitwise(pages[token], alone[0])
        assert length == lens[token]
    first, _ = ops.select_pages(batch.q[:3], codes, *ragged(batch), 16, 8)  # the first of the queries
    assert_bitwise(first, pages[:3])


def test_threads() -> None:
    torch.manual_seed(0)
    batch = make_batch([(1, 900), (3, 513), (4, 700)])
    codes = codes_of(batch)
    assert_bitwise(*per_thread_count(lambda: ops.select_pages(batch.q, codes, *ragged(batch), 16, 8)[0]))


def test_queries_that_see_nothing(device: str) -> None:
    """The first queries of a sequence have no pages if it has more queries than positions."""
    batch = make_batch([(5, 2), (1, 20)], device=device)
    _, lens = ops.select_pages(batch.q, codes_of(batch), *ragged(batch), 16, 4)
    assert lens.tolist() == [0, 0, 0, 1, 2, 20]


@pytest.mark.parametrize("device", [pytest.param(name, marks=mark) for name, mark in GPUS.items()], indirect=True)
def test_padding_of_a_recorded_step_reads_nothing(device: str) -> None:
    """Its tokens are behind those of all sequences, and its sequences have none."""
    batch = make_batch([(1, 900), (1, 513)], dtype=torch.bfloat16, device=device)
    codes = codes_of(batch)
    expected, lens = ops.select_pages(batch.q, codes, *ragged(batch), 16, 8)
    table = torch.full((4, batch.block_table.shape[1]), 2**30, dtype=torch.int32, device=device)
    table[:2] = batch.block_table
    ragged_lens = (
        torch.tensor(numbers, dtype=torch.int32, device=device) for numbers in ([900, 513, 0, 0], [0, 1, 2, 2, 2])
    )
    q = torch.cat([batch.q, torch.full_like(batch.q, torch.nan)])
    pages, padded_lens = ops.select_pages(q, codes, table, *ragged_lens, 16, 8)
    assert_bitwise(pages[:2], expected)
    assert padded_lens.tolist() == [*lens.tolist(), 0, 0]
    out = ops.paged_attention(
        q, batch.k_cache, batch.v_cache, pages, padded_lens, rows_of(batch)[:1].new_tensor(range(5))
    )
    assert (out[2:] == 0).all()


@pytest.mark.parametrize("device", [pytest.param(name, marks=mark) for name, mark in GPUS.items()], indirect=True)
def test_a_length_beyond_the_block_table_changes_nothing_else(device: str) -> None:
    """The CPU refuses it. On a GPU the token itself gets pages of its row of the table."""
    batch = make_batch([(1, 900), (1, 513)], dtype=torch.bfloat16, device=device)
    codes = codes_of(batch)
    expected, _ = ops.select_pages(batch.q, codes, *ragged(batch), 16, 8)
    table = batch.block_table.clamp(0, len(batch.k_cache) - 1)  # its second row has no blocks behind the 33rd
    lengths = batch.seq_lens + batch.seq_lens.new_tensor([0, 9000])
    pages, _ = ops.select_pages(batch.q, codes, table, lengths, batch.query_start, 16, 8)
    assert_bitwise(pages[0], expected[0])
    assert set(pages[1].flatten().tolist()) <= set(table[1].tolist())


def test_equal_estimates_and_what_is_not_finite(device: str) -> None:
    table, lengths, start = (
        torch.tensor(numbers, dtype=torch.int32, device=device) for numbers in ([range(9)], [9], [0, 1])
    )
    keys, codes = torch.zeros(9, 1, 1, 8, device=device), torch.zeros(9, 1, 2, 1, dtype=torch.int32, device=device)
    q = torch.ones(1, 2, 8, device=device)

    def chosen() -> list[int]:
        ops.store_key_codes(codes, keys, None, torch.arange(9, device=device))
        pages, _ = ops.select_pages(q, codes, table, lengths, start, 1, 5)
        return pages.flatten().tolist()

    keys[[0, 7, 8]] = torch.nan  # not read
    assert chosen() == [0, 1, 2, 7, 8]
    keys[4, 0, 0, 3] = 1.0
    keys[6, 0, 0, 3] = torch.inf
    assert chosen() == [0, 4, 6, 7, 8]
    keys[5, 0, 0, 2] = torch.nan
    assert chosen() == [0, 5, 6, 7, 8]
    q[0, 1, 3] = torch.nan
    assert chosen() == [0, 1, 2, 7, 8]


def test_a_channel_that_is_much_larger_hides_no_other(device: str) -> None:
    """Without the rotation the other channels of these keys would all be rounded to the smallest level."""
    torch.manual_seed(0)
    keys = torch.randn(40, 4, 1, 64)
    keys[..., 7] = 20.0
    q = torch.randn(1, 1, 64)
    q[..., 7] = 0.1
    exact = (torch.einsum("hd,ptkd->pt", q[0], keys) / 8).logsumexp(1)
    wanted = set(exact[1:-2].topk(12).indices.add(1).tolist())
    keys, q = keys.to(device), q.to(device)
    codes = torch.zeros(40, 1, 9, 4, dtype=torch.int32, device=device)
    ops.store_key_codes(codes, keys, None, torch.arange(160, device=device))
    ragged = (torch.tensor(numbers, dtype=torch.int32, device=device) for numbers in ([range(40)], [160], [0, 1]))
    pages, _ = ops.select_pages(q, codes, *ragged, 4, 15)
    assert len(wanted & set(pages.flatten().tolist())) >= 9


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 4, 12)}, "q must have a head_dim that is a multiple of 8, got 12"),
        ({"q": torch.zeros(2, 3, 8)}, "q must have a multiple of codes' 2 heads, got 3"),
        ({"codes": torch.zeros(9, 2, 2, 4)}, "codes must be int32"),
        ({"codes": torch.zeros(9, 2, 2, 8).int()}, "codes must have the shape"),
        ({"num_pages": 3}, "num_pages must be at least 4, got 3"),
        ({"block_size": 0}, "block_size must be positive and at most 2147483647, got 0"),
        ({"block_size": 2**32 + 4}, "block_size must be positive and at most 2147483647, got 4294967300"),
        ({"seq_lens": torch.tensor([25]).int()}, r"seq_lens\[0\] must be in 0..24 \(its blocks\), got 25"),
        ({"query_start": torch.tensor([0, 1]).int()}, "query_start must run from 0 to at least the number of tokens"),
        ({"block_table": torch.full((1, 6), 9).int()}, "block_table must have blocks in 0..8, got 9"),
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
        "num_pages": 4,
    }
    with pytest.raises(RuntimeError, match=message):
        ops.select_pages(**(call | change))
