"""The choice of single tokens: against fp64, poisoned where nothing may be read, and as a table of paged attention."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.attention_batches import ABSURD, Batch, make_batch, with_values_in_keys
from support.emulator import ORDERS, Emulator
from support.helpers import DTYPES, Guarded, assert_bitwise, device_fixture, per_thread_count
from torch import Tensor

from fastinfer import ops

device = device_fixture("cpu", "cuda", "emulated")
GPUS = {
    "cuda": pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    "emulated": pytest.mark.emulated,
}
on_gpus = pytest.mark.parametrize(
    "device", [pytest.param(name, marks=mark) for name, mark in GPUS.items()], indirect=True
)
# Of q and of the keys; a GPU takes 16-bit floats alone, and the same for both.
KINDS = [("cpu", dtype, key_dtype) for dtype in DTYPES for key_dtype in DTYPES]
KINDS += [(name, dtype, dtype) for name in GPUS for dtype in (torch.bfloat16, torch.float16)]
by_kind = pytest.mark.parametrize(
    ("device", "dtype", "key_dtype"),
    [pytest.param(*kind, marks=GPUS.get(kind[0], ())) for kind in KINDS],
    indirect=["device"],
)
fp32_or_bf16 = pytest.mark.parametrize(
    ("device", "dtype"),
    [("cpu", torch.float32)] + [pytest.param(name, torch.bfloat16, marks=mark) for name, mark in GPUS.items()],
    indirect=["device"],
)


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
    block_size, positions = batch.k_cache.shape[1], torch.arange(count, device=batch.q.device)
    return batch.block_table[sequence].long()[positions // block_size] * block_size + positions % block_size


def select(batch: Batch, weights: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    return ops.select_tokens(batch.q, weights, batch.k_cache, *ragged(batch), top_k)


def assert_best(batch: Batch, weights: Tensor, slots: Tensor, lens: Tensor, top_k: int) -> None:
    """The chosen tokens are in order, and none of the others has a higher score in fp64, but for fp32's noise."""
    for token, (sequence, position) in enumerate(positions_of(batch)):
        seen, count = slots_of(batch, sequence, position + 1), min(position + 1, top_k)
        assert lens[token] == count
        place_of = {slot: place for place, slot in enumerate(seen.tolist())}
        places = [place_of[slot] for slot in slots[token, :count].tolist()]
        assert places == sorted(set(places))
        keys = batch.k_cache.flatten(0, 2)[seen].double()
        products = batch.q[token].double() @ keys.T
        scores = weights[token].double() @ products.relu()
        others = sorted(set(range(position + 1)) - set(places))
        noise = 1e-5 * (weights[token].double().abs() @ products.abs()).max()
        assert not others or scores[others].max() <= scores[places].min() + noise


@by_kind
@pytest.mark.parametrize(
    ("heads", "head_dim", "block_size", "top_k"), [(9, 64, 16, 100), (64, 128, 16, 65), (1, 8, 3, 7), (5, 40, 5, 1)]
)
def test_tokens(
    heads: int,
    head_dim: int,
    block_size: int,
    top_k: int,
    dtype: torch.dtype,
    key_dtype: torch.dtype,
    device: str,
) -> None:
    lengths = [(1, 900), (3, 513), (1, 2), (0, 40), (2, 1500), (5, 30)]
    batch = make_batch(lengths, heads, 1, head_dim, block_size, dtype, key_dtype, device)
    weights = torch.randn(len(batch.q), heads + 3, device=device).to(dtype)[:, 1 : heads + 1]
    slots, lens = ops.select_tokens(Guarded(batch.q).view, weights, batch.k_cache, *ragged(batch), top_k)
    assert slots.shape == (len(batch.q), top_k)
    assert_best(batch, weights, slots, lens, top_k)


@pytest.mark.parametrize(("heads", "head_dim"), [(1, 1), (5, 37), (3, 200)])
def test_odd_sizes(heads: int, head_dim: int) -> None:
    """On the CPU alone."""
    torch.manual_seed(0)
    batch, weights = make_batch([(1, 300), (2, 77)], heads, 1, head_dim), torch.randn(3, heads)
    assert_best(batch, weights, *select(batch, weights, 60), 60)


@on_gpus
def test_the_choice_is_that_of_the_cpu(device: str) -> None:
    """Bit by bit where scores are exact: small integers, of which many are equal."""
    batch = make_batch([(1, 700), (4, 300), (2, 60)], 12, 1, 32, dtype=torch.float16, device=device)
    q, keys = (torch.randint(-2, 3, x.shape, device=device).half() for x in (batch.q, batch.k_cache))
    keys = torch.where(batch.k_cache.isnan(), batch.k_cache, keys)
    weights = torch.randint(-2, 3, (7, 12), device=device).half()
    lens, found = [], []
    for top_k in (1, 50, 64, 699):
        slots, count = ops.select_tokens(q, weights, keys, *ragged(batch), top_k)
        lens.append(count.cpu()), found.append(slots.cpu())
    host = (x.cpu() for x in (q, weights, keys, *ragged(batch)))
    q, weights, keys, *lengths = host
    for top_k, slots, count in zip((1, 50, 64, 699), found, lens, strict=True):
        expected, expected_lens = torch.ops.fastinfer.select_tokens(q, weights, keys, *lengths, top_k)
        assert_bitwise(count, expected_lens)
        for token, own in enumerate(count.tolist()):
            assert_bitwise(slots[token, :own], expected[token, :own])


def test_attention_to_all_tokens_is_dense_bit_by_bit() -> None:
    torch.manual_seed(0)
    for heads, kv_heads in ((9, 3), (20, 1)):
        batch = make_batch([(1, 900), (3, 513), (1, 1), (70, 130)], heads, kv_heads)
        index = make_batch([(1, 900), (3, 513), (1, 1), (70, 130)], 4, 1)
        keys = index.k_cache.new_full((*batch.k_cache.shape[:2], 1, 64), torch.nan)  # nothing is scored
        slots, lens = ops.select_tokens(index.q, torch.ones(75, 4), keys, *ragged(batch), 900)
        assert_bitwise(attend(batch, slots, lens), batch.run())


@on_gpus
@pytest.mark.parametrize(("head_dim", "value_dim"), [(320, 256), (576, 512)])
def test_attention_to_all_latents_is_dense_bit_by_bit(head_dim: int, value_dim: int, device: str) -> None:
    """If no row's sums are cut, which depends on the batch."""
    batch = make_batch([(1, 300), (3, 70), (2, 2)], 7, 1, head_dim, dtype=torch.bfloat16, device=device)
    batch = with_values_in_keys(batch, value_dim)
    q, weights = (torch.randn(6, *shape, device=device).bfloat16() for shape in ((4, 64), (4,)))
    keys = q.new_full((*batch.k_cache.shape[:2], 1, 64), torch.nan)  # nothing is scored
    slots, lens = ops.select_tokens(q, weights, keys, *ragged(batch), 300)
    with ops.batch_invariant():
        assert_bitwise(attend(batch, slots, lens), batch.run())


def attend(batch: Batch, slots: Tensor, lens: Tensor) -> Tensor:
    caches = [cache.flatten(0, 1).unsqueeze(1) for cache in (batch.k_cache, batch.v_cache)]
    rows = torch.arange(len(batch.q) + 1, dtype=torch.int32, device=batch.q.device)
    return ops.paged_attention(batch.q, *caches, slots, lens, rows)


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "value_dim"),
    [("cpu", torch.float32, 64, 64), ("cpu", torch.float32, 320, 256)]
    + [pytest.param(name, torch.bfloat16, 320, 256, marks=mark) for name, mark in GPUS.items()]
    + [pytest.param(name, torch.float16, 576, 512, marks=mark) for name, mark in GPUS.items()],
    indirect=["device"],
)
def test_attention_to_chosen_tokens(device: str, dtype: torch.dtype, head_dim: int, value_dim: int) -> None:
    """The result is that of attention to a cache with these tokens alone; the rest is NaN."""
    batch = make_batch([(1, 900), (2, 513), (3, 40)], 20, 1, head_dim, 16, dtype, device=device)
    batch = with_values_in_keys(batch, value_dim) if value_dim < head_dim else batch
    shape = *batch.k_cache.shape[:3], 24
    keys, q, weights = (torch.randn(shape, device=device).to(dtype) for shape in (shape, (6, 6, 24), (6, 6)))
    slots, lens = ops.select_tokens(q, weights, keys, *ragged(batch), 70)
    chosen = torch.zeros(keys.shape[:2].numel(), dtype=torch.bool, device=device)
    for token, count in enumerate(lens.tolist()):
        chosen[slots[token, :count].long()] = True
    batch.k_cache.flatten(0, 1)[~chosen] = torch.nan
    batch.v_cache.flatten(0, 1)[~chosen] = torch.nan
    found = attend(batch, slots, lens).float()
    close = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2**-6, "atol": 4e-3}
    for token, count in enumerate(lens.tolist()):
        own = slots[token, :count].long()
        k, v = (cache.flatten(0, 2)[own].float() for cache in (batch.k_cache, batch.v_cache))
        expected = (batch.q[token].float() @ k.T * head_dim**-0.5).softmax(-1) @ v
        torch.testing.assert_close(found[token], expected, **close)


@fp32_or_bf16
@pytest.mark.repeats
@pytest.mark.parametrize("heads", [3, 64])
def test_a_token_does_not_depend_on_the_others(heads: int, dtype: torch.dtype, device: str) -> None:
    batch = make_batch([(1, 2900), (3, 513), (4, 1300)], heads, 1, dtype=dtype, device=device)
    weights = torch.randn(8, heads, device=device).to(dtype)
    slots, lens = select(batch, weights, 50)
    for token, (sequence, position) in enumerate(positions_of(batch)):
        own = (torch.tensor(numbers, dtype=torch.int32, device=device) for numbers in ([position + 1], [0, 1]))
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


@on_gpus
def test_groups_of_tokens(device: str) -> None:
    """Contexts are so long that the scores of few tokens fit into memory at once; most of the table is never read."""
    batch = make_batch([(1, 700), (4, 90)], 3, 1, 64, 16, torch.bfloat16, device=device)
    weights = torch.randn(5, 3, device=device).bfloat16()
    expected, _ = select(batch, weights, 40)
    table = ABSURD.to(device).repeat(2, 2**19)  # of two tokens: 2**24 positions each
    table[:, : batch.block_table.shape[1]] = batch.block_table
    lengths = batch.seq_lens, batch.query_start
    slots, lens = ops.select_tokens(batch.q, weights, batch.k_cache, table, *lengths, 40)
    assert_bitwise(slots, expected)
    assert (lens == 40).all()


@on_gpus
def test_padding_of_a_recorded_step_reads_nothing(device: str) -> None:
    """Its tokens are behind those of all sequences, and its sequences have none."""
    batch = make_batch([(1, 900), (1, 513)], 20, 1, 320, dtype=torch.bfloat16, device=device)
    batch = with_values_in_keys(batch, 256)
    shape = *batch.k_cache.shape[:3], 128
    keys, q, weights = (torch.randn(shape, device=device).bfloat16() for shape in (shape, (2, 8, 128), (2, 8)))
    expected, lens = ops.select_tokens(q, weights, keys, *ragged(batch), 70)
    table = torch.full((4, batch.block_table.shape[1]), 2**30, dtype=torch.int32, device=device)
    table[:2] = batch.block_table
    ragged_lens = (
        torch.tensor(numbers, dtype=torch.int32, device=device) for numbers in ([900, 513, 0, 0], [0, 1, 2, 2, 2])
    )
    padded = [torch.cat([x, torch.full_like(x, torch.nan)]) for x in (q, weights, batch.q)]
    slots, padded_lens = ops.select_tokens(*padded[:2], keys, table, *ragged_lens, 70)
    assert_bitwise(slots[:2], expected)
    assert padded_lens.tolist() == [*lens.tolist(), 0, 0]
    batch.q = padded[2]
    assert (attend(batch, slots, padded_lens)[2:] == 0).all()


@on_gpus
def test_a_length_beyond_the_block_table_changes_nothing_else(device: str) -> None:
    """The CPU refuses it. On a GPU the token itself gets tokens of its row of the table."""
    batch = make_batch([(1, 900), (1, 513)], 4, 1, dtype=torch.bfloat16, device=device)
    weights = torch.randn(2, 4, device=device).bfloat16()
    expected, _ = select(batch, weights, 70)
    table = batch.block_table.clamp(0, len(batch.k_cache) - 1)  # its second row has no blocks behind the 33rd
    lengths = batch.seq_lens + batch.seq_lens.new_tensor([0, 9000])
    slots, lens = ops.select_tokens(batch.q, weights, batch.k_cache, table, lengths, batch.query_start, 70)
    assert_bitwise(slots[0], expected[0])
    assert set((slots[1] // 16).tolist()) <= set(table[1].tolist())
    assert (lens == 70).all()


@pytest.mark.emulated
@pytest.mark.parametrize("device", [pytest.param("emulated")], indirect=True)
@pytest.mark.parametrize("gpu", ["A100", "H100", "small Hopper"])
def test_blocks_that_share_a_token(gpu: str, device: str, emulated_library: Path) -> None:
    """The choice depends neither on how many these are nor on their order."""
    batch = make_batch([(1, 1900), (2, 700)], 16, 1, 128, dtype=torch.bfloat16, device=device)
    weights = torch.randn(3, 16, device=device).bfloat16()
    emulator = Emulator(emulated_library)
    expected, _ = select(batch, weights, 90)
    with emulator.device(gpu):
        for order in ORDERS:
            with emulator.block_order(order):
                assert_bitwise(select(batch, weights, 90)[0], expected)


def test_queries_that_see_nothing(device: str) -> None:
    """The first queries of a sequence have no tokens if it has more queries than positions."""
    batch = make_batch([(5, 2), (1, 20)], 2, 1, dtype=torch.bfloat16, device=device)
    weights = torch.ones(6, 2, dtype=torch.bfloat16, device=device)
    assert select(batch, weights, 4)[1].tolist() == [0, 0, 0, 1, 2, 4]


def test_equal_scores_and_nan(device: str) -> None:
    table, lengths, start = (
        torch.tensor(numbers, dtype=torch.int32, device=device) for numbers in ([range(9)], [9], [0, 1])
    )
    keys, q = (
        torch.full(shape, value, device=device).bfloat16() for shape, value in (((9, 1, 1, 8), 0), ((1, 2, 8), 1))
    )
    weights = torch.tensor([[1.0, -1.0]], device=device).bfloat16()

    def chosen(top_k: int = 3) -> list[int]:
        slots, _ = ops.select_tokens(q, weights, keys, table, lengths, start, top_k)
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
    q[:], weights[:], keys[:] = 1.0, 1.0, 0.0
    keys[3], keys[6] = torch.inf, torch.nan
    assert chosen(1) == [6]


@on_gpus
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": torch.float32}, "q must be bfloat16 or float16 on CUDA, got float32"),
        ({"key_dtype": torch.float16}, "keys must be, as q, bfloat16 on CUDA, got float16"),
        ({"head_dim": 20}, "on CUDA q must have a head_dim that is a multiple of 8 and at most 128, got 20"),
        ({"head_dim": 136}, "on CUDA q must have a head_dim that is a multiple of 8 and at most 128, got 136"),
        ({"heads": 4000}, "4000 heads need 1040000 bytes of shared memory"),
        ({"offset": 1}, "keys must be aligned to 16 bytes"),
    ],
)
def test_what_gpus_refuse(change: dict[str, Any], message: str, device: str) -> None:
    sizes = {"dtype": torch.bfloat16, "key_dtype": None, "head_dim": 8, "heads": 4, "offset": 0} | change
    dtype, heads, head_dim = sizes["dtype"], sizes["heads"], sizes["head_dim"]
    q, weights = (torch.zeros(2, *shape, dtype=dtype, device=device) for shape in ((heads, head_dim), (heads,)))
    memory = torch.zeros(9 * 4 * head_dim + 1, dtype=sizes["key_dtype"] or dtype, device=device)
    keys = memory[sizes["offset"] :][: 9 * 4 * head_dim].view(9, 4, 1, head_dim)
    lengths = (torch.tensor(numbers, dtype=torch.int32, device=device) for numbers in ([range(6)], [24], [0, 2]))
    with pytest.raises(RuntimeError, match=message):
        ops.select_tokens(q, weights, keys, *lengths, 4)


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
