"""How real GPUs cut the work, on the emulator: results do not depend on the order in which blocks run.

Sums are added up in the order of the workers and attention's parts in that of the cache, whichever block is last.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import reference
from support.attention_batches import Batch, assert_attention, make_batch, quantized
from support.emulator import ORDERS, Emulator
from support.expert_stack import ExpertStack, random_ids
from support.helpers import assert_bitwise, assert_rounded, device_fixture, gemm_options
from support.linear_formats import Linear
from torch import Tensor

from fastinfer import ops

device = device_fixture("emulated")


@pytest.fixture(params=["A100", "H100"])
def emulator(request: pytest.FixtureRequest, device: str, emulated_library: Path) -> Iterator[Emulator]:
    emulator = Emulator(emulated_library)
    with emulator.device(request.param):
        yield emulator


def same_in_any_order(emulator: Emulator, run: Callable[[], Tensor]) -> Tensor:
    results = []
    for order in ORDERS:
        with emulator.block_order(order):
            results.append(run())
    for result in results[1:]:
        assert_bitwise(result, results[0])
    return results[0]


@pytest.mark.parametrize(
    ("form", "tokens", "fusion"),
    [("dense", 3, "plain"), ("int4 min", 16, "norm+bias+residual"), ("int8", 33, "plain"), ("int4", 70, "plain")],
)
def test_products_that_are_cut(form: str, tokens: int, fusion: str, emulator: Emulator, device: str) -> None:
    in_features = 1280 if tokens > 64 else 1024  # wide units are cut if that saves enough chunks
    x = torch.randn(tokens, in_features, device=device).bfloat16()
    linear = Linear(form, 160, in_features, torch.bfloat16, device, 128)
    options: dict[str, Any] = gemm_options(fusion, x, 160, torch.float32)
    out = same_in_any_order(emulator, lambda: linear.run(x, **options))
    slack = 2e-2 if tokens > 64 or "norm" in fusion else 1e-5
    assert_rounded(out, reference.gemm(x, linear.dense, **options), slack)


@pytest.mark.parametrize("tokens", [5, 40])
def test_int8_products_that_are_cut(tokens: int, emulator: Emulator, device: str) -> None:
    check_int8_product(tokens, 2048, emulator, device)


def test_int8_products_in_the_widest_tile(emulated_library: Path, device: str) -> None:
    """Two units: of each, two blocks have three chunks and one has two, of which the last is not a whole one."""
    emulator = Emulator(emulated_library)
    with emulator.device("small Hopper"):
        check_int8_product(150, 928, emulator, device)


def check_int8_product(tokens: int, in_features: int, emulator: Emulator, device: str) -> None:
    q, weight = (torch.randint(-127, 128, (rows, in_features), device=device).to(torch.int8) for rows in (tokens, 160))
    ones, scales = torch.ones(tokens, device=device), ops.pack_scales(torch.ones(160, 1, device=device))
    packed = ops.int8_pack(weight)
    out = same_in_any_order(emulator, lambda: ops.w8a8_gemm(q, ones, packed, scales, 160, dtype=torch.float32))
    assert_bitwise(out, (q.long() @ weight.long().T).float())


def test_experts(emulator: Emulator, device: str) -> None:
    stack = ExpertStack("int4 min", 5, 48, 224, torch.bfloat16, device)
    x, ids = torch.randn(40, 224, device=device).bfloat16(), random_ids(40, 2, 5, device)
    same_in_any_order(emulator, lambda: stack.run(x, ids))


@pytest.mark.parametrize(
    ("lengths", "cache_dtype"),
    [([(1, 1500)], torch.int8), ([(1, 700), (0, 7), (3, 200), (20, 100)], torch.float16)],
)
def test_attention_that_is_cut(
    lengths: list[tuple[int, int]], cache_dtype: torch.dtype, emulator: Emulator, device: str
) -> None:
    batch = make_batch(lengths, 6, 2, 64, dtype=torch.float16, device=device)
    if cache_dtype == torch.int8:
        batch = quantized(batch, cache_dtype)
    assert_attention(batch)
    same_in_any_order(emulator, batch.run)


def test_row_tiles_of_prompts_stay_whole(emulated_library: Path, device: str) -> None:
    """Blocks take them in turn, whichever block is first; they are cut where a sequence decodes, or one is long."""
    lengths = [(300, 300), (0, 50), (70, 200), (40, 40)]
    batch = make_batch(lengths, 6, 2, 64, dtype=torch.float16, device=device)
    assert_attention(batch)
    same_in_any_order(Emulator(emulated_library), batch.run)
    assert_attention(quantized(batch, torch.int8))
    row_tiles = sum(-(-3 * queries // 128) for queries, _ in lengths) * 2
    assert plan_header(batch) == (0, row_tiles)
    equal = [(20, 500)] * 7  # 14 row tiles on 12 blocks: whole ones would take two rounds
    for cut in ([*lengths, (1, 70)], [(64, 6000)], equal):
        units_per_block, _ = plan_header(make_batch(cut, 6, 2, 64, dtype=torch.float16, device=device))
        assert units_per_block > 0, cut


def plan_header(batch: Batch) -> tuple[int, int]:
    """Units of work that each block gets, 0 if no row tile is cut, and whole row tiles."""
    plan = ops.paged_attention_plan(batch.seq_lens, batch.query_start, 6, 2, 64)
    units_per_block, row_tiles = plan[:4].cpu().view(torch.int64).tolist()
    return units_per_block, row_tiles


def test_pages_that_blocks_share(emulator: Emulator, device: str) -> None:
    batch = make_batch([(1, 3000), (2, 700)], 6, 2, 128, 4, torch.bfloat16, device=device)
    blocks = len(batch.k_cache)
    codes = torch.zeros(blocks, 2, 17, 4, dtype=torch.int32, device=device)
    ops.store_key_codes(codes, batch.k_cache, None, torch.arange(4 * blocks, device=device))
    ragged = batch.block_table, batch.seq_lens, batch.query_start

    def select() -> Tensor:
        """The chosen pages, and zeros behind them."""
        pages, lens = ops.select_pages(batch.q, codes, *ragged, 4, 0.6)
        return pages * (torch.arange(pages.shape[2], device=device) < -(-lens // 4)[..., None])

    found = same_in_any_order(emulator, select)
    with emulator.device("small"):
        assert_bitwise(select(), found)
