"""Products with a stack of experts on the CPU: bitwise those of the dense operators, expert by expert.

tests/ops/test_cuda_grouped_gemm.py has the GPU's.
"""

from typing import Any

import pytest
import torch
from support import reference
from support.expert_stack import FORMATS, ExpertStack, random_ids, routing_of
from support.helpers import DTYPES, Guarded, assert_bitwise, assert_rounded, device_fixture, per_thread_count
from torch import Tensor

from fastinfer import ops
from fastinfer.ops.pack import interleave_gate_up

device = device_fixture("cpu", "avx512")

# A form and its options: products of integers for int8, int4 and tables of integers.
PRODUCTS: list[tuple[str, dict[str, Any]]] = [
    *((form, {}) for form in FORMATS),
    *(
        (form, {"activation_bits": bits})
        for form in ("int8 min", "int4", "int4 min", "table of integers")
        for bits in (16, 8)
    ),
]
SHAPES = [(1, 1, 4), (1, 8, 8), (3, 2, 5), (17, 8, 128), (64, 2, 4)]  # tokens, top_k, experts


def expert_by_expert(
    stack: ExpertStack, x: Tensor, expert_ids: Tensor, *, bias: Tensor | None = None, **options: Any
) -> Tensor:
    """The dense operators on each expert's rows, gathered and scattered by torch."""
    experts = expert_ids.flatten()
    x = x.repeat_interleave(len(experts) // max(len(x), 1), 0)
    parts = {
        expert: stack.run_expert(
            expert, x[experts == expert], bias=None if bias is None else bias[expert].contiguous(), **options
        )
        for expert in experts.tolist()
    }
    out = x.new_zeros(len(experts), next(iter(parts.values())).shape[1])
    for expert, part in parts.items():
        out[experts == expert] = part
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("tokens", "top_k", "experts"), SHAPES)
def test_shapes(tokens: int, top_k: int, experts: int, form: str, dtype: torch.dtype, device: str) -> None:
    """A row per token and expert of x, as the first product has it, then a row each, as the second one has it."""
    ids = random_ids(tokens, top_k, experts)
    stack = ExpertStack(form, experts, 33, 96)
    for rows in (tokens, tokens * top_k):
        x = torch.randn(rows, 96).to(dtype)
        out = stack.run(x, ids)
        assert out.dtype == dtype
        assert_rounded(out, reference.grouped_gemm(x, stack.dense, ids), slack=1e-5)
        assert_bitwise(out, expert_by_expert(stack, x, ids))


@pytest.mark.parametrize("activation", [None, "silu", "gelu_tanh", "gelu", "clamped_swiglu"])
@pytest.mark.parametrize(("form", "options"), PRODUCTS)
def test_activations(form: str, options: dict[str, Any], activation: str | None, device: str) -> None:
    ids = random_ids(9, 2, 6)
    stack = ExpertStack(form, 6, 64, 96)
    x = torch.randn(9, 96).bfloat16()
    out = stack.run(x, ids, activation=activation, **options)
    assert_bitwise(out, expert_by_expert(stack, x, ids, activation=activation, **options))
    if not options:
        assert_rounded(out, reference.grouped_gemm(x, stack.dense, ids, activation=activation), slack=5e-5)


@pytest.mark.parametrize("tokens", [1, 9, 90])
@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("form", "options"), [*PRODUCTS, ("int5", {"activation_bits": 32}), ("int6", {"activation_bits": 32})]
)
def test_biases(form: str, options: dict[str, Any], bias_dtype: torch.dtype, tokens: int, device: str) -> None:
    """The width is odd, or that of gate and up; the biases of experts without rows are not read."""
    ids = random_ids(tokens, 2, 6).clamp(max=3)
    k = 256 if form == "int6" else 96
    x = torch.randn(tokens, k).bfloat16()
    for out_features, activation in ((33, None), (64, "silu"), (96, "clamped_swiglu")):
        stack = ExpertStack(form, 6, out_features, k)
        bias = (3 * torch.randn(6, out_features)).to(bias_dtype)
        bias[4:] = torch.nan
        fused = {"bias": bias, "activation": activation}
        out = stack.run(x, ids, **fused, **options)
        assert_bitwise(out, expert_by_expert(stack, x, ids, **fused, **options))
        if options.get("activation_bits", 32) == 32:
            assert_rounded(out, reference.grouped_gemm(x, stack.dense, ids, **fused), slack=1e-4)


@pytest.mark.parametrize("weight_dtype", DTYPES)
def test_dense_weights_of_any_dtype(weight_dtype: torch.dtype, device: str) -> None:
    """Inputs in two chunks, and no multiple of a vector."""
    ids = random_ids(7, 2, 4)
    stack = ExpertStack("dense", 4, 17, 1099, weight_dtype)
    x = torch.randn(7, 1099)
    assert_rounded(stack.run(x, ids), reference.grouped_gemm(x, stack.dense, ids), slack=1e-5)


@pytest.mark.parametrize(("form", "options"), PRODUCTS)
def test_some_of_the_experts(form: str, options: dict[str, Any], device: str) -> None:
    """Rows of the others are neither read nor computed."""
    ids = random_ids(19, 3, 8)
    stack = ExpertStack(form, 8, 33, 64)
    x = torch.randn(57, 64)
    expected = stack.run(x, ids, **options)
    own = ((ids >= 2) & (ids < 5)).flatten()
    x[~own] = torch.nan
    row_ids, start = routing_of(ids, 8)
    shared = {"table", "out_features"}
    some = {name: value if name in shared or value is None else value[2:5] for name, value in stack.arguments.items()}
    out = torch.full_like(expected, torch.nan)
    stack.operator(x, **some, row_ids=row_ids, expert_start=start[2:6], out=out, **options)
    assert_bitwise(out[own], expected[own])
    assert out[~own].isnan().all()


@pytest.mark.parametrize(("form", "options"), PRODUCTS)
def test_experts_without_rows_are_not_read(form: str, options: dict[str, Any], device: str) -> None:
    stack = ExpertStack(form, 8, 33, 64)
    x = torch.randn(19, 64)
    ids = torch.tensor([2, 5])[torch.randint(0, 2, (19, 1))]
    expected = stack.run(x, ids, **options)
    stack.poison(torch.tensor([0, 1, 3, 4, 6, 7]))
    assert_bitwise(stack.run(x, ids, **options), expected)
    stack.poison(torch.tensor([5]))  # shows in the rows of its tokens alone
    assert_bitwise(stack.run(x, ids, **options).isnan().all(1), ids.flatten() == 5)


@pytest.mark.parametrize(("form", "options"), PRODUCTS)
def test_all_tokens_to_one_expert(form: str, options: dict[str, Any], device: str) -> None:
    stack = ExpertStack(form, 5, 33, 64)
    x = torch.randn(70, 64)
    for expert in (0, 4):
        ids = torch.full((70, 1), expert)
        assert_bitwise(stack.run(x, ids, **options), stack.run_expert(expert, x, **options))


@pytest.mark.parametrize(("form", "options"), PRODUCTS)
def test_many_rows_of_few_experts(form: str, options: dict[str, Any], device: str) -> None:
    """Weights that are unpacked for many rows at once, which begin anywhere."""
    ids = torch.tensor([[0, 2]]).expand(90, 2).clone()
    ids[:37, 0] = 1
    stack = ExpertStack(form, 3, 64, 96)
    x = torch.randn(90, 96)
    assert_bitwise(stack.run(x, ids, **options), expert_by_expert(stack, x, ids, **options))


@pytest.mark.parametrize("form", FORMATS)
def test_no_tokens(form: str, device: str) -> None:
    assert ExpertStack(form, 4, 33, 64).run(torch.zeros(0, 64), torch.zeros(0, 2)).shape == (0, 33)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("form", "options"), PRODUCTS)
def test_a_token_does_not_depend_on_its_batch_or_the_threads(
    form: str, options: dict[str, Any], dtype: torch.dtype, device: str
) -> None:
    ids = random_ids(33, 2, 6)
    stack = ExpertStack(form, 6, 64, 96)
    x = torch.randn(33, 96).to(dtype)
    one, two = per_thread_count(lambda: stack.run(x, ids, activation="silu", **options))
    assert_bitwise(one, two)
    for size in (1, 4):
        parts = zip(x.split(size), ids.split(size), strict=True)
        assert_bitwise(torch.cat([stack.run(*part, activation="silu", **options) for part in parts]), one)


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize(("form", "options"), PRODUCTS)
def test_units_that_are_finished_together(
    form: str, options: dict[str, Any], activation: str | None, device: str
) -> None:
    """With up to eight rows the sums of eight units; here each expert has 20 or 10, and one, eight and nine rows."""
    ids = torch.repeat_interleave(torch.arange(3), torch.tensor([1, 8, 9])).view(-1, 1)[torch.randperm(18)]
    stack = ExpertStack(form, 3, 320, 96)
    x = torch.randn(18, 96)
    fused = {"bias": torch.randn(3, 320), "activation": activation}
    expected = expert_by_expert(stack, x, ids, **fused, **options)
    for out in per_thread_count(lambda: stack.run(x, ids, **fused, **options)):
        assert_bitwise(out, expected)


@pytest.mark.parametrize("form", FORMATS)
def test_strided_rows(form: str, device: str) -> None:
    ids = random_ids(5, 2, 4)
    stack = ExpertStack(form, 4, 33, 64)
    x = torch.randn(5, 64)
    assert_bitwise(stack.run(Guarded(x).view, ids), stack.run(x, ids))


def test_reference_is_that_of_torch() -> None:
    """A mixture of two experts, written down once more."""
    torch.manual_seed(0)
    x, gate, up = torch.randn(5, 64).double(), torch.randn(2, 32, 64).double(), torch.randn(2, 32, 64).double()
    ids = torch.tensor([[0, 1], [1, 0], [0, 1], [1, 0], [1, 0]])
    weight = torch.stack([interleave_gate_up(*pair) for pair in zip(gate, up, strict=True)])
    every = torch.nn.functional.silu(x @ gate.mT) * (x @ up.mT)  # [experts, tokens, 32]
    expected = torch.stack([every[ids[:, i], range(5)] for i in range(2)], 1).flatten(0, 1)
    torch.testing.assert_close(reference.grouped_gemm(x, weight, ids, activation="silu"), expected)


ROW_IDS, START = routing_of(torch.tensor([[0, 3], [1, 3], [3, 0]]), 4)
ROUTING = {"row_ids": ROW_IDS, "expert_start": START}
COMMON: dict[str, tuple[str, dict[str, Any]]] = {
    "x dtype": ("x", {"x": torch.zeros(3, 64).double()}),
    "x columns strided": ("x", {"x": torch.zeros(64, 3).T}),
    "in_features": ("x", {"x": torch.zeros(3, 96)}),
    "rows no multiple of the tokens": ("row_ids", {"x": torch.zeros(4, 64)}),
    "rows without tokens": ("row_ids", {"x": torch.zeros(0, 64)}),
    "row_ids dtype": ("row_ids", {"row_ids": ROW_IDS.long()}),
    "row_ids strided": ("row_ids", {"row_ids": torch.zeros(12, dtype=torch.int32)[::2]}),
    "row_ids past the rows": (
        r"row_ids\[2\] must be in 0..5, got 6",
        {"row_ids": torch.tensor([0, 1, 6, 2, 3, 4]).int()},
    ),
    "row_ids negative": (r"row_ids\[0\]", {"row_ids": torch.tensor([-1, 1, 5, 2, 3, 4]).int()}),
    "expert_start length": ("expert_start", {"expert_start": START[:-1]}),
    "expert_start decreases": ("expert_start must not decrease", {"expert_start": torch.tensor([0, 4, 2, 6, 6]).int()}),
    "expert_start ends late": ("expert_start must be within the 6", {"expert_start": START + START // 6}),
    "expert_start begins early": ("expert_start must be within the 6", {"expert_start": START - (START == 0).int()}),
    "bias of one expert": ("bias", {"bias": torch.zeros(32)}),
    "bias of other experts": ("bias", {"bias": torch.zeros(3, 32)}),
    "bias dtype": ("bias", {"bias": torch.zeros(4, 32).half()}),
    "bias strided": ("bias", {"bias": torch.zeros(32, 4).T}),
    "unknown activation": ("activation", {"activation": "relu"}),
}
DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "weight 2-d": ("weight", {"weight": torch.zeros(32, 64)}),
    "weight dtype": ("weight", {"weight": torch.zeros(4, 32, 64).int()}),
    "weight strided": ("weight", {"weight": torch.zeros(4, 64, 32).mT}),
    "half a gate": ("gated activation", {"weight": torch.zeros(4, 48, 64), "activation": "silu"}),
}
PACKED: dict[str, tuple[str, dict[str, Any]]] = {
    "qweight of one expert": ("qweight", {"qweight": torch.zeros(2, 2, 8, 16, 4, dtype=torch.int8)}),
    "no experts": ("qweight", {"qweight": torch.zeros(0, 2, 2, 8, 16, 4, dtype=torch.int8)}),
    "qweight dtype": ("qweight", {"qweight": torch.zeros(4, 2, 2, 8, 16, 4, dtype=torch.uint8)}),
    "scales of other experts": ("scales", {"scales": torch.ones(3, 2, 2, 16)}),
    "scales tiles": ("scales", {"scales": torch.ones(4, 1, 2, 16)}),
    "mins dtype": ("mins", {"mins": torch.ones(4, 2, 2, 16).half()}),
    "mins strided": ("mins", {"mins": torch.ones(2, 4, 2, 16).transpose(0, 1)}),
    "out_features": ("out_features", {"out_features": 33}),
    "activation_bits": ("activation_bits", {"activation_bits": 4}),
}


@pytest.mark.parametrize("case", COMMON | DENSE)
def test_errors_name_the_argument(case: str) -> None:
    argument, change = (COMMON | DENSE)[case]
    with pytest.raises(RuntimeError, match=rf"{argument}"):
        ops.grouped_gemm(**({"x": torch.zeros(3, 64), "weight": torch.zeros(4, 32, 64)} | ROUTING | change))


@pytest.mark.parametrize("case", COMMON | PACKED)
def test_errors_of_packed_weights_name_the_argument(case: str) -> None:
    argument, change = (COMMON | PACKED)[case]
    good = {
        "x": torch.zeros(3, 64),
        "qweight": torch.zeros(4, 2, 2, 8, 16, 4, dtype=torch.int8),
        "scales": torch.ones(4, 2, 2, 16),
        "mins": None,
        "out_features": 32,
    }
    with pytest.raises(RuntimeError, match=rf"{argument}"):
        ops.grouped_int8_gemm(**(good | ROUTING | change))


@pytest.mark.parametrize(("form", "activation_bits"), [("int5", 8), ("int6", 32), ("int6", 16), ("int6", 8)])
@pytest.mark.parametrize(("tokens", "top_k", "experts"), SHAPES)
def test_five_and_six_bits(tokens: int, top_k: int, experts: int, form: str, activation_bits: int, device: str) -> None:
    ids = random_ids(tokens, top_k, experts)
    stack = ExpertStack(form, experts, 33, 256)
    x = torch.randn(tokens, 256).bfloat16()
    out = stack.run(x, ids, activation_bits=activation_bits)
    assert_bitwise(out, expert_by_expert(stack, x, ids, activation_bits=activation_bits))
    if activation_bits == 32:
        assert_rounded(out, reference.grouped_gemm(x, stack.dense, ids), slack=1e-5)
