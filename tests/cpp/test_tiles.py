"""Rows of prompts in tiles: where this machine has none, in the software form, in a process of its own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import reference
from support.expert_stack import FORMATS as STACKS
from support.expert_stack import ExpertStack, random_ids
from support.helpers import GEMM_FUSIONS, assert_bitwise, gemm_options, num_threads, per_thread_count
from support.quantized_gemm import random_weight
from support.tiles import in_tiles, run_in_software
from torch import Tensor

from fastinfer import ops

FORMATS = ("int4", "int4 symmetric", "int4 two levels", "int5", "int6", "int8", "lut", "bf16", "fp16", "fp32")
Product = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.slow
def test_in_software() -> None:
    run_in_software(__file__)


def product(name: str, out_features: int, in_features: int) -> tuple[Product, Tensor]:
    """A product with a random weight, and the weight."""
    dense = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}.get(name)
    if dense is not None:
        weight = (torch.randn(out_features, in_features) * in_features**-0.5).to(dense)
        return lambda x, **options: ops.gemm(x, weight, **options), weight.float()
    bits = {"int5": 5, "int6": 6, "int8": 8}.get(name, 4)
    mins = name not in ("int4 symmetric", "lut")
    packed = random_weight(bits, out_features, in_features, mins=mins, two_level="two" in name)
    arguments: dict[str, Any] = dict(packed.packed)
    if name == "lut":
        table = torch.randn(16)
        del arguments["mins"]
        values = packed.scales.float().repeat_interleave(32, 1) * table[packed.q.long()]
        return lambda x, **options: ops.lut_gemm(x, table=table, **arguments, **options), values
    operator = getattr(ops, f"int{bits}_gemm")
    return lambda x, **options: operator(x, **arguments, **options), packed.dense.float()


def assert_near(out: Tensor, x: Tensor, weight: Tensor, **options: Any) -> None:
    """The product with the weight rounded to bf16. One weight in many thousands lies so near to the middle that it
    rounds the other way here. x is rounded as well where it is not bf16 already, and so is the result.
    """
    expected = reference.gemm(x, weight.bfloat16().double(), **options).double()
    difference = (out.double() - expected).abs()
    exact = x.dtype == torch.float32 and torch.equal(x, x.bfloat16().float()) and "norm_weight" not in options
    largest, mean = (2e-3, 1e-5) if exact else (0.02, 0.003)
    assert difference.max() <= largest * (expected.abs().max() + 1)
    assert difference.mean() <= mean * (expected.abs().mean() + 1)


@in_tiles
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("rows", "out_features", "in_features"), [(1, 1, 256), (17, 40, 768), (70, 113, 1280)])
def test_products(name: str, rows: int, out_features: int, in_features: int) -> None:
    run, weight = product(name, out_features, in_features)
    x = torch.randn(rows, in_features).bfloat16().float()
    with ops.prompt_rows(0):
        assert_near(run(x), x, weight)


@in_tiles
@pytest.mark.parametrize("in_features", [1, 31, 33, 545])
def test_dense_weights_of_any_width(in_features: int) -> None:
    run, weight = product("bf16", 19, in_features)
    memory = torch.full((5, in_features + 3), torch.nan)
    x = memory[:, :in_features].copy_(torch.randn(5, in_features).bfloat16())
    with ops.prompt_rows(0):
        assert_near(run(x), x, weight)


@in_tiles
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("fusion", GEMM_FUSIONS)
@pytest.mark.parametrize("name", ["int4", "bf16"])
def test_fusions(name: str, fusion: str, dtype: torch.dtype) -> None:
    run, weight = product(name, 96, 512)
    x = torch.randn(37, 512).to(dtype)
    options = gemm_options(fusion, x, 96, torch.float32)
    with ops.prompt_rows(0):
        assert_near(run(x, **options), x, weight, **options)


@in_tiles
@pytest.mark.parametrize("name", FORMATS)
def test_a_row_does_not_depend_on_its_batch_its_place_or_the_threads(name: str) -> None:
    run, _ = product(name, 100, 1536)
    x = torch.randn(67, 1536).bfloat16()
    norm = {"norm_weight": torch.rand(1536), "eps": 1e-5}
    with ops.prompt_rows(0):
        one, two = per_thread_count(lambda: run(x, **norm))
        assert_bitwise(one, two)
        for size in (1, 5, 32):
            assert_bitwise(torch.cat([run(rows, **norm) for rows in x.split(size)]), one)


@in_tiles
@pytest.mark.parametrize("in_features", [256, 4096, 5120])
def test_many_rows_in_several_sweeps(in_features: int) -> None:
    run, _ = product("int4", 32, in_features)
    x = torch.randn(1100, in_features).bfloat16()
    with ops.prompt_rows(0):
        assert_bitwise(torch.cat([run(rows) for rows in x.split(300)]), run(x))


@in_tiles
@pytest.mark.parametrize(
    ("rows", "out_features", "in_features", "fusion"),
    [(530, 304, 1280, "bias+residual"), (35, 608, 640, "bias+silu"), (35, 304, 544, "bias+residual")],
)
def test_sums_of_many_units_are_finished_together(rows: int, out_features: int, in_features: int, fusion: str) -> None:
    """More than eight, the last of which may be half empty. With 544 inputs, one panel, each is finished alone."""
    run, weight = product("int4", out_features, in_features)
    x = torch.randn(rows, in_features)
    options = gemm_options(fusion, x, out_features, torch.float32)
    with ops.prompt_rows(0), num_threads(1):
        assert_near(run(x, **options), x, weight, **options)


@in_tiles
@pytest.mark.parametrize(
    ("name", "bits"), [(name, bits) for name in FORMATS for bits in ((8, 16, 32) if name[:3] == "int" else (None,))]
)
def test_rows_before_the_first_are_as_without(name: str, bits: int | None) -> None:
    options: dict[str, Any] = {} if bits is None else {"activation_bits": bits}
    run, _ = product(name, 64, 512)
    x, options["residual"] = torch.randn(23, 512), torch.randn(23, 64)
    without = run(x, **options)
    with ops.prompt_rows(0):
        prompt = run(x, **options)
    assert not torch.equal(prompt, without)
    for first in (1, 7, 22, 23, 1000):
        with ops.prompt_rows(first):
            assert_bitwise(run(x, **options), torch.cat([without[:first], prompt[first:]]))


@in_tiles
@pytest.mark.parametrize("stack_name", [*STACKS, "int6"])
@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(1, 1, 4), (3, 2, 5), (70, 2, 3), (33, 8, 64)])
def test_experts_are_products_with_their_weights(tokens: int, top_k: int, experts: int, stack_name: str) -> None:
    """A row per token of x, as the first product has it, then a row each, as the second one has it."""
    ids = random_ids(tokens, top_k, experts)
    stack = ExpertStack(stack_name, experts, 32, 256)
    for rows in (tokens, tokens * top_k):
        x = torch.randn(rows, 256).bfloat16()
        each = x.repeat_interleave(tokens * top_k // rows, 0)
        with ops.prompt_rows(0):
            out = stack.run(x, ids, activation="silu")
            for expert in ids.unique().tolist():
                here = ids.flatten() == expert
                assert_bitwise(out[here], stack.run_expert(expert, each[here], activation="silu"))


@in_tiles
@pytest.mark.parametrize("stack_name", ["dense", "int4"])
def test_rows_of_experts_that_are_no_multiple_of_a_tile(stack_name: str) -> None:
    ids = random_ids(19, 2, 4)
    stack = ExpertStack(stack_name, 4, 41, 96)
    x = torch.randn(19, 96)
    with ops.prompt_rows(0):
        out = stack.run(x, ids).view(19, 2, 41)
        expected = torch.stack([stack.run_expert(expert, x) for expert in range(4)])
    assert_bitwise(out, expected[ids, torch.arange(19)[:, None]])


@in_tiles
@pytest.mark.parametrize("stack_name", ["dense", "int4 min"])
@pytest.mark.parametrize("top_k", [1, 3])
def test_rows_of_experts_before_the_first_are_as_without(top_k: int, stack_name: str) -> None:
    ids = random_ids(23, top_k, 5)
    stack = ExpertStack(stack_name, 5, 64, 96)
    options = {} if stack_name == "dense" else {"activation_bits": 8}
    for x in (torch.randn(23, 96), torch.randn(23 * top_k, 96)):
        without = stack.run(x, ids, **options)
        with ops.prompt_rows(0):
            prompt = stack.run(x, ids, **options)
        assert not (prompt == without).all(1).any()
        for first in (1, 7, 22, 23, 1000):
            repeats = top_k if len(x) > 23 else 1
            with ops.prompt_rows(first), ops.prompt_rows_of_experts(repeats):
                mixed = stack.run(x, ids, **options)
            assert_bitwise(mixed, torch.cat([without[: first * top_k], prompt[first * top_k :]]))


@in_tiles
def test_experts_without_rows_are_not_read() -> None:
    stack = ExpertStack("int4", 8, 33, 64)
    x, ids = torch.randn(40, 64), torch.tensor([2, 5])[torch.randint(0, 2, (40, 1))]
    with ops.prompt_rows(0):
        expected = stack.run(x, ids)
        stack.poison(torch.tensor([0, 1, 3, 4, 6, 7]))
        assert_bitwise(stack.run(x, ids), expected)


@in_tiles
def test_experts_by_any_number_of_threads() -> None:
    ids = random_ids(90, 2, 6)
    stack = ExpertStack("int4", 6, 64, 96)
    x = torch.randn(90, 96)
    with ops.prompt_rows(0):
        assert_bitwise(*per_thread_count(lambda: stack.run(x, ids)))


def lora_options(tokens: int, rank: int, features: int, out: int, weight_dtype: torch.dtype) -> dict[str, Any]:
    """Adapters of three ranks, NaN where nobody may read, and tokens of each and of none."""
    ranks = torch.tensor([rank, max(rank - 3, 1), (rank + 1) // 2], dtype=torch.int32)
    a, b = torch.randn(3, rank, features) / features**0.5, torch.randn(3, rank, out) / rank**0.5
    for slot, used in enumerate(ranks.tolist()):
        a[slot, used:], b[slot, used:] = torch.nan, torch.nan
    ids = torch.randint(-1, 3, (tokens,), dtype=torch.int32)
    ids[tokens // 2 :] = 1
    return {"a": a.to(weight_dtype), "b": b.to(weight_dtype), "ranks": ranks, "adapter_ids": ids}


def lora_in_bfloat16(y: Tensor, x: Tensor, norm: dict[str, Any], options: dict[str, Any]) -> Tensor:
    """The same with everything that tiles multiply rounded to bf16, summed in fp64."""
    x = reference.rms_norm(x.double(), norm["norm_weight"].double(), norm["eps"]) if norm else x.double()
    x, out = x.bfloat16().double(), y.double().clone()
    for row, slot in enumerate(options["adapter_ids"].tolist()):
        if slot < 0:
            continue
        rank = int(options["ranks"][slot])
        a, b = (options[name][slot, :rank].bfloat16().double() for name in "ab")
        out[row] += (a @ x[row]).bfloat16().double() @ b
    return out


def add_lora(y: Tensor, x: Tensor, **options: Any) -> Tensor:
    out = y.clone()
    ops.add_lora(out, x, **options)
    return out


@in_tiles
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("tokens", "rank", "features", "out"),
    [(1, 8, 96, 192), (17, 5, 577, 145), (150, 16, 64, 33), (5, 1, 1, 1), (70, 64, 1056, 48), (3, 600, 16, 31)],
)
def test_lora(tokens: int, rank: int, features: int, out: int, weight_dtype: torch.dtype, dtype: torch.dtype) -> None:
    """Near to bf16's own reference, and, by bf16's rounding, to the one that rounds nothing."""
    x, y = torch.randn(tokens, features).to(dtype), torch.randn(tokens, out).to(dtype)
    options = lora_options(tokens, rank, features, out, weight_dtype)
    for norm in ({}, {"norm_weight": torch.rand(features) + 0.5, "eps": 1e-5}):
        with ops.prompt_rows(0):
            found = add_lora(y, x, **options, **norm)
        assert_bitwise(found[options["adapter_ids"] < 0], y[options["adapter_ids"] < 0])
        added = (found.double() - y.double()).abs().mean() + 0.01
        rounding = torch.finfo(dtype).eps
        expected = lora_in_bfloat16(y, x, norm, options)
        # A sum of the first product that lies near to the middle of two bf16 may round the other way.
        assert (found.double() - expected).abs().mean() <= (2e-4 + rounding) * added + rounding
        exact = reference.add_lora(y, x, **options, **norm)
        assert (found.double() - exact).abs().mean() <= (0.01 + rounding) * added + rounding
        assert (found.double() - exact).abs().max() <= 0.05 * (exact.abs().max() + 1)


@in_tiles
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_of_lora_does_not_depend_on_its_batch_its_place_or_the_threads(dtype: torch.dtype) -> None:
    x, y = torch.randn(150, 577).to(dtype), torch.randn(150, 113).to(dtype)
    options = lora_options(150, 40, 577, 113, torch.bfloat16)
    norm = {"norm_weight": torch.rand(577), "eps": 1e-5}
    ids = options.pop("adapter_ids")
    with ops.prompt_rows(0):
        together = add_lora(y, x, adapter_ids=ids, **options, **norm)
        assert_bitwise(*per_thread_count(lambda: add_lora(y, x, adapter_ids=ids, **options, **norm)))
        for begin, end in ((0, 1), (3, 40), (40, 149), (149, 150)):
            some = slice(begin, end)
            assert_bitwise(add_lora(y[some], x[some], adapter_ids=ids[some], **options, **norm), together[some])
        order = torch.randperm(150)
        assert_bitwise(add_lora(y[order], x[order], adapter_ids=ids[order], **options, **norm), together[order])


@in_tiles
def test_rows_of_lora_before_the_first_are_as_without() -> None:
    x, y = torch.randn(67, 96), torch.randn(67, 64)
    options = lora_options(67, 16, 96, 64, torch.float32)
    options["adapter_ids"] = torch.randint(0, 3, (67,), dtype=torch.int32)
    without = add_lora(y, x, **options)
    with ops.prompt_rows(0):
        prompt = add_lora(y, x, **options)
    assert not (prompt == without).all(1).any()
    for first in (1, 7, 66, 67, 1000):
        with ops.prompt_rows(first):
            assert_bitwise(add_lora(y, x, **options), torch.cat([without[:first], prompt[first:]]))


@in_tiles
@pytest.mark.parametrize("own_inputs", [False, True])
def test_lora_of_experts(own_inputs: bool) -> None:
    """Rows of a token's experts have its role; each is the update of one matrix."""
    tokens, top_k, experts, features, runs = 37, 3, 5, 72, 3
    x = torch.randn(tokens * top_k if own_inputs else tokens, features)
    each = [lora_options(tokens, 8, features, runs * 16, torch.bfloat16) for _ in range(experts)]
    matrices = {name: torch.stack([one[name] for one in each], 1).contiguous() for name in ("a", "b", "ranks")}
    ids = torch.randint(-1, 3, (tokens,), dtype=torch.int32)
    expert_ids = random_ids(tokens, top_k, experts).int()
    y = torch.randn(tokens * top_k, runs, 2, 16)

    def run() -> Tensor:
        out = y.clone()
        ops.add_lora(out[:, :, 1], x, **matrices, adapter_ids=ids, expert_ids=expert_ids)
        return out

    without = run()
    with ops.prompt_rows(0):
        prompt = run()
        assert_bitwise(prompt[:, :, 0], y[:, :, 0])
        for row, expert in enumerate(expert_ids.flatten().tolist()):
            token = row // top_k
            one = {name: matrices[name][:, expert].contiguous() for name in matrices}
            source = x[row : row + 1] if own_inputs else x[token : token + 1]
            before = y[row : row + 1, :, 1].flatten(1)
            alone = add_lora(before, source, **one, adapter_ids=ids[token : token + 1])
            assert_bitwise(prompt[row : row + 1, :, 1].flatten(1), alone)
    with ops.prompt_rows(20):
        assert_bitwise(run(), torch.cat([without[: 20 * top_k], prompt[20 * top_k :]]))


@in_tiles
def test_infinite_inputs_of_lora_spoil_no_other_row() -> None:
    """Ranks and rows that fill up tiles count as zero, whatever is beside them."""
    x, y = torch.randn(5, 96), torch.zeros(5, 32)
    options = lora_options(5, 8, 96, 32, torch.float32)
    options["adapter_ids"] = torch.zeros(5, dtype=torch.int32)
    with ops.prompt_rows(0):
        finite = add_lora(y, x, **options)
        x[2, 3], options["a"][0, :, 3] = torch.inf, 1.0
        options["b"][0] = options["b"][0].abs()
        expected = add_lora(y[:4], torch.cat([x[:2], x[3:]]), **options | {"adapter_ids": options["adapter_ids"][:4]})
        found = add_lora(y, x, **options)
    assert finite.isfinite().all()
    assert found[2].isposinf().all()
    assert_bitwise(torch.cat([found[:2], found[3:]]), expected)


@in_tiles
@pytest.mark.parametrize("first", [0, 1000])
@pytest.mark.parametrize("name", ["int4", "bf16"])
def test_ranges_of_rows_of_a_unit_have_the_bits_of_all(name: str, first: int) -> None:
    """Five threads share six units in tiles, or twelve in vectors, of which one or two are left to be cut.

    Two threads have 128 rows or more each, and take rows of their own.
    """
    run, _ = product(name, 192, 96)
    x = torch.randn(307, 96).bfloat16()
    with ops.prompt_rows(first):
        with num_threads(1):
            expected = run(x)
        for threads in (2, 5):
            with num_threads(threads):
                assert_bitwise(run(x), expected)


def int8_product(x: Tensor, x_scales: Tensor, weight: dict[str, Any], **options: Any) -> Tensor:
    """Row by row in vectors: tiles begin with 16 rows."""
    residual = options.pop("residual", None)
    rows = range(len(x))
    added = [{} if residual is None else {"residual": residual[row : row + 1]} for row in rows]
    return torch.cat([ops.w8a8_gemm(x[r : r + 1], x_scales[r : r + 1], **weight, **options, **added[r]) for r in rows])


def int8_weight(q: Tensor) -> dict[str, Any]:
    return {
        "qweight": ops.int8_pack(q),
        "scales": ops.pack_scales(torch.rand(len(q), 1)),
        "out_features": len(q),
    }


@in_tiles
@pytest.mark.parametrize(
    ("rows", "out_features", "in_features"),
    [
        (16, 1, 32),
        (17, 33, 64),
        (33, 40, 96),
        (70, 128, 1056),
        (40, 300, 2080),
        (20, 17, 3200),
        (1100, 32, 128),
        (16, 16, 131_040),
    ],
)
def test_int8_tiles_compute_integers(rows: int, out_features: int, in_features: int) -> None:
    """Bit by bit what the vectors compute, with the largest sums that there are."""
    x = torch.randint(-127, 128, (rows, in_features)).to(torch.int8)
    q = torch.randint(-128, 128, (out_features, in_features)).to(torch.int8)
    x[0], q[0] = 127, -128
    x_scales, weight = torch.rand(rows), int8_weight(q)
    out = ops.w8a8_gemm(x, x_scales, **weight, dtype=torch.float32)
    scales = weight["scales"].flatten()[:out_features]
    assert_bitwise(out, (x.long() @ q.long().T).float() * scales * x_scales[:, None] + 0.0)
    assert_bitwise(out, int8_product(x, x_scales, weight, dtype=torch.float32))


@in_tiles
@pytest.mark.parametrize("fusion", ["bias+residual", "bias+silu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_int8_tiles_have_the_bits_of_the_vectors_for_any_number_of_rows(dtype: torch.dtype, fusion: str) -> None:
    x, x_scales = torch.randint(-127, 128, (307, 160)).to(torch.int8), torch.rand(307)
    weight = int8_weight(torch.randint(-128, 128, (96, 160)).to(torch.int8))
    options = gemm_options(fusion, torch.empty(307, 160, dtype=dtype), 96, torch.float32) | {"dtype": dtype}
    expected = int8_product(x, x_scales, weight, **options)
    residual = options.pop("residual", None)
    for rows in (15, 16, 17, 32, 33, 47, 307):
        if residual is not None:
            options["residual"] = residual[:rows]
        for threads in (1, 2, 5):
            with num_threads(threads):
                assert_bitwise(ops.w8a8_gemm(x[:rows], x_scales[:rows], **weight, **options), expected[:rows])


@in_tiles
@pytest.mark.parametrize("row", [0, 18])
@pytest.mark.parametrize("column", [0, 95])
def test_int8_tiles_refuse_what_the_vectors_refuse(row: int, column: int) -> None:
    x = torch.zeros(19, 96, dtype=torch.int8)
    x[row, column] = -128
    weight = int8_weight(torch.ones(16, 96, dtype=torch.int8))
    with pytest.raises(RuntimeError, match=r"x must be -127\.\.127 throughout"):
        ops.w8a8_gemm(x, torch.ones(19), **weight, dtype=torch.float32)


def multiply_slowly(x: Tensor, weight: Tensor) -> Tensor:
    """TDPBF16PS as Intel's manual has it, of numbers that are bf16, one by one; fused, as measured."""

    def flush(values: Tensor) -> Tensor:
        tiny = values.abs() < torch.finfo(torch.float32).tiny
        return torch.where(tiny, torch.zeros(()).copysign(values), values)

    def fused(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        """Rounds twice, to fp64 and fp32: exact for the sums here, whose parts lie close together."""
        return flush((a.double() * b.double() + c.double()).float())

    x, weight = flush(x), flush(weight)
    sums = torch.zeros(x.shape[0], weight.shape[0])
    for block in range(0, x.shape[1], 32):
        even, odd = torch.zeros_like(sums), torch.zeros_like(sums)
        for k in range(block, block + 32, 2):
            even = fused(x[:, None, k], weight[None, :, k], even)
            odd = fused(x[:, None, k + 1], weight[None, :, k + 1], odd)
        sums = flush(sums + flush(even + odd))
    return sums + 0.0  # the epilogue adds a bias of 0


@in_tiles
@pytest.mark.parametrize("kind", ["normal", "wide", "denormal", "infinite", "nan"])
def test_tiles_compute_what_the_manual_says(kind: str) -> None:
    x, weight = torch.randn(19, 96).bfloat16().float(), torch.randn(35, 96).bfloat16().float()
    if kind == "wide":
        x *= torch.exp2(torch.randint(-8, 8, x.shape).float())
    elif kind == "denormal":  # arguments, products and sums around the smallest normal number
        x *= torch.exp2(torch.randint(-134, -58, x.shape).float())
        weight *= torch.exp2(torch.randint(-70, -60, weight.shape).float())
    elif kind == "infinite":
        x[3, 5], x[4, 6], weight[7, 9], weight[8, 10] = torch.inf, -torch.inf, torch.inf, 0.0
    elif kind == "nan":
        x[3, 5], weight[7, 9] = torch.nan, torch.nan
    x = x.bfloat16().float()
    with ops.prompt_rows(0):
        out = ops.gemm(x, weight.bfloat16())
    expected = multiply_slowly(x, weight)
    assert torch.equal(out.isnan(), expected.isnan())
    assert_bitwise(out.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0))


@in_tiles
def test_nan_of_an_earlier_call_is_forgotten() -> None:
    """It lies in a thread's scratch memory, behind the inputs of this call's rows."""
    with num_threads(1), ops.prompt_rows(0):
        ops.gemm(torch.full((20, 512), torch.nan), torch.ones(17, 512))
        assert ops.gemm(torch.randn(20, 77), torch.randn(17, 77)).isfinite().all()
