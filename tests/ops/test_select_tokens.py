"""The choice of single tokens: against fp64, poisoned where nothing may be read, and as a table of paged attention."""

import pytest
import torch
from support.attention_batches import Batch, make_batch
from support.helpers import DTYPES, Guarded, assert_bitwise, per_thread_count
from torch import Tensor

from fastinfer import ops


def ragged(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    return batch.block_table, batch.seq_lens, batch.query_start


def positions_of(batch: Batch) -> list[tuple[int, int]]:
    """Sequence and position of each token."""
    places = []
    for sequence, length in enumerate(batch.seq_lens.tolist()):
        count = int(batch.query_start[sequence + 1] - batch.query_start[sequence])
        places += [(sequence, length - count + i) for i in range(count)]
    return places


def slots_of(batch: Batch, sequence: int, count: int) -> Tensor:
    """Slots of the first positions of a sequence."""
    block_size, positions = batch.k_cache.shape[1], torch.arange(count)
    return batch.block_table[sequence].long()[positions // block_size] * block_size + positions % block_size


def select(batch: Batch, weights: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    return ops.select_tokens(batch.q, weights, batch.k_cache, *ragged(batch), top_k)


@pytest.mark.parametrize("key_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "head_dim", "block_size", "top_k"), [(9, 64, 16, 100), (64, 128, 16, 65), (1, 1, 3, 7), (5, 37, 5, 1)]
)
def test_tokens(
    heads: int, head_dim: int, block_size: int, top_k: int, dtype: torch.dtype, key_dtype: torch.dtype
) -> None:
    lengths = [(1, 900), (3, 513), (1, 2), (0, 40), (2, 1500), (5, 30)]
    batch = make_batch(lengths, heads, 1, head_dim, block_size, dtype, key_dtype)
    weights = torch.randn(len(batch.q), heads + 3).to(dtype)[:, 1 : heads + 1]
    slots, lens = ops.select_tokens(Guarded(batch.q).view, weights, batch.k_cache, *ragged(batch), top_k)
    assert slots.shape == (len(batch.q), top_k)
    for token, (sequence, position) in enumerate(positions_of(batch)):
        seen, count = slots_of(batch, sequence, position + 1), min(position + 1, top_k)
        assert lens[token] == count
        chosen = slots[token, :count].tolist()
        places = [seen.tolist().index(slot) for slot in chosen]
        assert places == sorted(set(places))
        keys = batch.k_cache.flatten(0, 2)[seen].double()
        products = batch.q[token].double() @ keys.T
        scores = weights[token].double() @ products.relu()
        others = [i for i in range(position + 1) if i not in places]
        noise = 1e-5 * (weights[token].double().abs() @ products.abs()).max()
        assert not others or scores[others].max() <= scores[places].min() + noise


def test_attention_to_all_tokens_is_dense_bit_by_bit() -> None:
    torch.manual_seed(0)
    for heads, kv_heads in ((9, 3), (20, 1)):
        batch = make_batch([(1, 900), (3, 513), (1, 1), (70, 130)], heads, kv_heads)
        index = make_batch([(1, 900), (3, 513), (1, 1), (70, 130)], 4, 1)
        keys = index.k_cache.new_full((*batch.k_cache.shape[:2], 1, 64), torch.nan)  # nothing is scored
        slots, lens = ops.select_tokens(index.q, torch.ones(75, 4), keys, *ragged(batch), 900)
        assert_bitwise(attend(batch, slots, lens), batch.run())


def attend(batch: Batch, slots: Tensor, lens: Tensor) -> Tensor:
    caches = (cache.flatten(0, 1).unsqueeze(1) for cache in (batch.k_cache, batch.v_cache))
    rows = torch.arange(len(batch.q) + 1, dtype=torch.int32)
    return ops.paged_attention(batch.q, *caches, slots, lens, rows)


def test_attention_to_chosen_tokens() -> None:
    """The result is that of attention to a cache with these tokens alone; the rest is NaN."""
    torch.manual_seed(0)
    batch = make_batch([(1, 900), (2, 513)], 20, 1, block_size=16)
    keys, q = torch.randn(*batch.k_cache.shape[:3], 24), torch.randn(3, 6, 24)
    slots, lens = ops.select_tokens(q, torch.randn(3, 6), keys, *ragged(batch), 70)
    found = attend(batch, slots, lens)
    for token in range(3):
        own = slots[token].long()
        k, v = (cache.flatten(0, 2)[own] for cache in (batch.k_cache, batch.v_cache))
        expected = (batch.q[token] @ k.T / 8).softmax(-1) @ v
        torch.testing.assert_close(found[token], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("heads", [3, 64])
def test_a_token_does_not_depend_on_the_others(heads: int) -> None:
    torch.manual_seed(0)
    batch = make_batch([(1, 2900), (3, 513), (4, 1300)], heads, 1)
    weights = torch.randn(8, heads)
    slots, lens = select(batch, weights, 50)
    for token, (sequence, position) in enumerate(positions_of(batch)):
        own = (torch.tensor(numbers, dtype=torch.int32) for numbers in ([position + 1], [0, 1]))
        one, row = slice(token, token + 1), batch.block_table[sequence : sequence + 1].contiguous()
        alone, length = ops.select_tokens(batch.q[one], weights[one], batch.k_cache, row, *own, 50)
        assert_bitwise(slots[token], alone[0])
        assert length == lens[token]
    first, _ = ops.select_tokens(batch.q[:3], weights[:3], batch.k_cache, *ragged(batch), 50)
    assert_bitwise(first, slots[:3])  # the first of the queries


def test_threads() -> None:
    torch.manual_seed(0)
    batch, weights = make_batch([(1, 5000), (3, 513), (4, 700)], 8, 1), torch.randn(8, 8)
    assert_bitwise(*per_thread_count(lambda: select(batch, weights, 100)[0]))


def test_more_tokens_than_are_scored_at_once() -> None:
    torch.manual_seed(0)
    batch, weights = make_batch([(300, 8000)], 2, 1, 8), torch.randn(300, 2)
    slots, lens = select(batch, weights, 20)
    assert (lens == 20).all()
    part = Batch(batch.q[250:], batch.k_cache, batch.v_cache, batch.block_table, batch.seq_lens, torch.tensor([0, 50]))
    part.query_start = part.query_start.int()
    assert_bitwise(select(part, weights[250:], 20)[0], slots[250:])


def test_queries_that_see_nothing() -> None:
    """The first queries of a sequence have no tokens if it has more queries than positions."""
    batch = make_batch([(5, 2), (1, 20)], 2, 1)
    assert select(batch, torch.ones(6, 2), 4)[1].tolist() == [0, 0, 0, 1, 2, 4]


def test_equal_scores_and_nan() -> None:
    table, lengths, start = (torch.tensor(numbers, dtype=torch.int32) for numbers in ([range(9)], [9], [0, 1]))
    keys, q, weights = torch.zeros(9, 1, 1, 8), torch.ones(1, 2, 8), torch.tensor([[1.0, -1.0]])

    def chosen() -> list[int]:
        slots, _ = ops.select_tokens(q, weights, keys, table, lengths, start, 3)
        return slots.flatten().tolist()

    assert chosen() == [0, 1, 2]
    keys[1] = -1.0  # which counts as 0
    assert chosen() == [0, 1, 2]
    q[0, 1] = 0.0
    keys[4], keys[7] = 1.0, torch.inf
    assert chosen() == [0, 4, 7]
    keys[5] = torch.nan
    keys[8] = -torch.nan
    assert chosen() == [5, 7, 8]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 0, 8)}, r"q must have a head and an element, got \[2, 0, 8\]"),
        ({"weights": torch.zeros(2, 3)}, r"weights must have the shape \[2, 4\], got \[2, 3\]"),
        ({"weights": torch.zeros(2, 4).half()}, "weights must be float32, got float16"),
        ({"keys": torch.zeros(9, 4, 2, 8)}, r"keys must have the shape \[\*, \*, 1, 8\], got \[9, 4, 2, 8\]"),
        ({"keys": torch.zeros(9, 4, 1, 8).to(torch.int8)}, "keys must be"),
        ({"top_k": 0}, "top_k must be positive and at most 2147483647, got 0"),
        ({"seq_lens": torch.tensor([25]).int()}, r"seq_lens\[0\] must be in 0..24 \(its blocks\), got 25"),
        ({"query_start": torch.tensor([0, 1]).int()}, "query_start must run from 0 to at least the number of tokens"),
        ({"query_start": torch.tensor([0, 3, 2]).int()}, r"query_start must have the shape \[2\], got \[3\]"),
        ({"block_table": torch.full((1, 6), 9).int()}, "block_table must have blocks in 0..8, got 9"),
        ({"block_table": torch.full((1, 6), -1).int(), "top_k": 24}, "block_table must have blocks in 0..8, got -1"),
    ],
)
def test_errors(change: dict[str, Tensor | int], message: str) -> None:
    call = {
        "q": torch.zeros(2, 4, 8),
        "weights": torch.zeros(2, 4),
        "keys": torch.zeros(9, 4, 1, 8),
        "block_table": torch.arange(6).int()[None],
        "seq_lens": torch.tensor([24]).int(),
        "query_start": torch.tensor([0, 2]).int(),
        "top_k": 4,
    }
    with pytest.raises(RuntimeError, match=message):
        ops.select_tokens(**(call | change))
