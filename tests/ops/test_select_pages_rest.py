"""Attention to the pages that are not chosen, by codes of keys and values: against fp64 and dense attention."""

from typing import Any

import pytest
import torch
from support import reference
from support.attention_batches import Batch, make_batch
from support.helpers import DTYPES, GuardedResult, assert_bitwise, device_fixture, per_thread_count
from torch import Tensor

from fastinfer import ops

device = device_fixture("cpu", "emulated")


def codes_of(batch: Batch) -> tuple[Tensor, Tensor]:
    blocks, block_size, heads, head_dim = batch.k_cache.shape
    codes = [torch.zeros(blocks, heads, head_dim // 8 + 1, block_size, dtype=torch.int32) for _ in range(2)]
    slots = torch.arange(blocks * block_size)
    ops.store_key_codes(codes[0], batch.k_cache, None, slots)
    ops.store_value_codes(codes[1], batch.v_cache, None, slots)
    return codes[0], codes[1]


def select(batch: Batch, codes: tuple[Tensor, Tensor], share: float, **options: Any) -> tuple[Tensor, ...]:
    """Pages, lengths, and the attention to the other pages, whose memory begins as NaN."""
    block_size = batch.k_cache.shape[1]
    rest = GuardedResult(torch.full_like(batch.q, torch.nan)), GuardedResult(torch.full(batch.q.shape[:2], torch.nan))
    ragged = batch.block_table, batch.seq_lens, batch.query_start, block_size, share
    outs = {"rest": rest[0].view, "rest_lse": rest[1].view}
    found = ops.select_pages(batch.q, codes[0], *ragged, value_codes=codes[1], **outs, **options)
    for guarded in rest:
        guarded.assert_intact()
    return *found, rest[0].view, rest[1].view


def expected_rest(
    q: Tensor, position: int, codes: tuple[Tensor, Tensor], blocks: Tensor, others: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of the query heads [heads, head_dim] of one KV head to some pages, by codes, and its lse, in fp64."""
    rotated, size = reference.hadamard(q), q.shape[-1] & -q.shape[-1]
    step = rotated.abs().amax(-1, keepdim=True) / 127
    rounded = (rotated / step).round() * step / size
    levels, scales = reference.key_levels(codes[0][blocks[others]])
    keys = (levels * scales[..., None].double()).flatten(0, 2)
    levels, scales = reference.value_levels(codes[1][blocks[others]])
    values = reference.hadamard((levels * scales[..., None].double()).flatten(0, 2)) / size
    logits = scale * rounded @ keys.T
    return logits.softmax(-1) @ values, logits.logsumexp(-1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "head_dim", "block_size", "share"),
    [
        (9, 3, 64, 16, 0.5),
        (4, 4, 8, 8, 0.6),
        (12, 1, 80, 24, 0.4),
        (2, 1, 256, 32, 0.3),
        (7, 1, 24, 8, 0.5),
        (5, 1, 96, 40, 0.2),
        (6, 2, 320, 16, 0.01),
    ],
)
def test_the_other_pages(
    q_heads: int, kv_heads: int, head_dim: int, block_size: int, share: float, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    batch = make_batch([(1, 900), (3, 513), (1, 2), (2, 1500)], q_heads, kv_heads, head_dim, block_size, dtype)
    codes, scale, group = codes_of(batch), head_dim**-0.5, q_heads // kv_heads
    pages, lens, rest, rest_lse = select(batch, codes, share, num_dense_pages=4, scale=scale)
    token = 0
    for sequence, length in enumerate(batch.seq_lens.tolist()):
        count = int(batch.query_start[sequence + 1] - batch.query_start[sequence])
        for position in range(length - count, length):
            blocks = batch.block_table[sequence, : position // block_size + 1].long()
            for head in range(kv_heads):
                chosen = pages[token, head, : -(-int(lens[token, head]) // block_size)].long()
                others = torch.isin(blocks, chosen, invert=True).nonzero().flatten()
                own = slice(head * group, head * group + group)
                if not len(others):
                    assert (rest_lse[token, own] == -torch.inf).all()
                    continue
                codes_of_head = codes[0][:, head : head + 1].contiguous(), codes[1][:, head : head + 1].contiguous()
                out, lse = expected_rest(batch.q[token, own], position, codes_of_head, blocks, others, scale)
                # Less than a 64th of the attention is left out, and probabilities are rounded to seven bits in a page.
                torch.testing.assert_close(rest_lse[token, own].double(), lse, rtol=0, atol=0.02)
                error = (rest[token, own].double() - out).norm(dim=-1) / out.norm(dim=-1)
                assert error.max() < 0.03
            token += 1
    assert token == len(batch.q)


def test_the_sum_is_nearly_dense_attention() -> None:
    """With a quarter of the pages, whose attention alone is far from that to all."""
    torch.manual_seed(0)
    batch = make_batch([(1, 900), (2, 1500)])
    dense = batch.run().double()
    pages, lens, rest, rest_lse = select(batch, codes_of(batch), 0.3)
    assert (lens < batch.seq_lens[[0, 1, 1], None] // 2).all()
    lse, rows = torch.empty_like(rest_lse), torch.arange(4, dtype=torch.int32)
    own = ops.paged_attention(batch.q, batch.k_cache, batch.v_cache, pages, lens, rows, lse=lse)
    merged, _ = ops.merge_attention_states(own, lse, rest, rest_lse)
    errors = [float((x - dense).norm() / dense.norm()) for x in (own, merged)]
    assert errors[1] < 0.15 < 5 * errors[1] < errors[0]


def test_nothing_is_left_of_rows_that_read_all_pages() -> None:
    batch = make_batch([(1, 900), (1, 40)])
    for share, num_dense_pages in ((1.0, 0), (0.1, 57)):
        _, _, rest, rest_lse = select(batch, codes_of(batch), share, num_dense_pages=num_dense_pages)
        assert (rest_lse == -torch.inf).all()
        dense, lse = batch.run(), torch.zeros_like(rest_lse)
        merged, _ = ops.merge_attention_states(dense, lse, rest, rest_lse)
        assert_bitwise(merged, dense)


def test_codes_of_other_pages_are_not_read() -> None:
    """NaN in the scales of pages that are chosen, and in those of blocks of no sequence, changes nothing."""
    torch.manual_seed(0)
    batch = make_batch([(1, 900)], q_heads=3, kv_heads=1)
    codes = codes_of(batch)
    expected = select(batch, codes, 0.5)
    own = expected[0][0, 0, : -(-int(expected[1]) // 16)].long()
    blocks = batch.block_table[0, : -(-900 // 16)].long()
    others = blocks[torch.isin(blocks, own, invert=True)]
    poisoned = torch.full_like(codes[1], -1)  # all bits: a NaN as a scale
    poisoned[others] = codes[1][others]
    found = select(batch, (codes[0], poisoned), 0.5)
    assert_bitwise(found[2], expected[2])
    assert_bitwise(found[3], expected[3])


def test_a_value_that_is_not_finite_shows() -> None:
    torch.manual_seed(0)
    batch = make_batch([(1, 900)], q_heads=3, kv_heads=1)
    codes = codes_of(batch)
    pages, lens, *_ = select(batch, codes, 0.3)
    chosen = pages[0, 0, : -(-int(lens) // 16)].tolist()
    other = next(block for block in batch.block_table[0, :56].tolist() if block not in chosen)
    batch.v_cache[other, 3, 0, 5] = torch.inf
    assert select(batch, codes_of(batch), 0.3)[2].isnan().all()


@pytest.mark.repeats
def test_a_token_does_not_depend_on_the_others() -> None:
    torch.manual_seed(0)
    batch = make_batch([(1, 900), (3, 513)])
    codes = codes_of(batch)
    together = select(batch, codes, 0.5)
    for token, (sequence, length) in enumerate([(0, 900), (1, 511), (1, 512), (1, 513)]):
        rest, rest_lse = torch.zeros(1, *batch.q.shape[1:]), torch.zeros(1, batch.q.shape[1])
        table = batch.block_table[sequence : sequence + 1].contiguous()
        ragged = table, torch.tensor([length]).int(), torch.tensor([0, 1]).int(), 16, 0.5
        outs = {"value_codes": codes[1], "rest": rest, "rest_lse": rest_lse}
        ops.select_pages(batch.q[token : token + 1], codes[0], *ragged, **outs)
        assert_bitwise(rest[0], together[2][token])
        assert_bitwise(rest_lse[0], together[3][token])


def test_threads() -> None:
    torch.manual_seed(0)
    batch = make_batch([(1, 900), (3, 513)])
    codes = codes_of(batch)
    assert_bitwise(*per_thread_count(lambda: select(batch, codes, 0.5)[2]))


CALL: dict[str, Any] = {"q": torch.zeros(2, 4, 8), "block_table": torch.arange(6).int()[None], "block_size": 8}
CALL |= {"codes": torch.zeros(6, 2, 2, 8).int(), "value_codes": torch.zeros(6, 2, 2, 8).int(), "share": 0.5}
CALL |= {"seq_lens": torch.tensor([48]).int(), "query_start": torch.tensor([0, 2]).int()}
CALL |= {"rest": torch.zeros(2, 4, 8), "rest_lse": torch.zeros(2, 4)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"value_codes": torch.zeros(6, 2, 2, 8)}, "value_codes must be int32"),
        ({"value_codes": torch.zeros(5, 2, 2, 8).int()}, "value_codes must have the shape"),
        ({"rest": torch.zeros(2, 4, 8).half()}, "rest must be float32"),
        ({"rest": torch.zeros(2, 4, 16)}, "rest must have the shape"),
        ({"rest_lse": torch.zeros(2, 3)}, "rest_lse must have the shape"),
        ({"rest_lse": torch.zeros(2, 4).double()}, "rest_lse must be float32"),
        (
            {"codes": torch.zeros(6, 2, 2, 4).int(), "value_codes": torch.zeros(6, 2, 2, 4).int(), "block_size": 4},
            "block_size must be a multiple of 8 with value_codes, got 4",
        ),
        ({"row_start": torch.tensor([0, 2]).int()}, "row_start must be None with value_codes"),
        ({"rest": None}, "value_codes, rest and rest_lse must be given together"),
        ({"value_codes": None}, "value_codes, rest and rest_lse must be given together"),
    ],
)
def test_errors(change: dict[str, Any], message: str) -> None:
    with pytest.raises((RuntimeError, TypeError), match=message):
        ops.select_pages(**(CALL | change))


@pytest.mark.emulated
@pytest.mark.parametrize("device", ["emulated"], indirect=True)
def test_on_a_gpu(device: str) -> None:
    with pytest.raises(RuntimeError, match="value_codes must be None on CUDA"):
        ops.select_pages(**CALL)
