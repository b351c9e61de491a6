"""The integer product against fp64, to one fp32 epilogue: the sums themselves are exact."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support import reference
from support.helpers import DTYPES, assert_bitwise, assert_rounded, device_fixture, gemm_options, per_thread_count
from torch import Tensor

from fastinfer import ops

device = device_fixture("cpu", "avx512", "cuda", "emulated")

FUSIONS = ["plain", "bias", "residual", "bias+residual", "silu", "bias+silu", "gelu_tanh", "gelu", "clamped_swiglu"]


@dataclass
class Case:
    """Integers of both sides and their scales, which differ by four from row to row."""

    x: Tensor
    x_scales: Tensor
    q: Tensor
    scales: Tensor

    @property
    def packed(self) -> dict[str, Any]:
        return {
            "x": self.x,
            "x_scales": self.x_scales,
            "qweight": ops.int8_pack(self.q),
            "scales": ops.pack_scales(self.scales),
            "out_features": self.q.shape[0],
        }

    def expected(self, **options: Any) -> Tensor:
        x, weight = self.x.double() * self.x_scales[:, None].double(), self.q.double() * self.scales.double()
        return reference.gemm(x, weight, **options)


def random_case(
    tokens: int, out_features: int, in_features: int, device: str, scale_dtype: torch.dtype = torch.float32
) -> Case:
    x = torch.randint(-127, 128, (tokens, in_features), device=device).to(torch.int8)
    q = torch.randint(-128, 128, (out_features, in_features), device=device).to(torch.int8)
    x_scales = (torch.rand(tokens, device=device) + 0.3) / 100
    scales = (torch.rand(out_features, 1, device=device) + 0.3) / in_features**0.5 / 50
    return Case(x, x_scales, q, scales.to(scale_dtype))


def run_and_check(case: Case, dtype: torch.dtype = torch.float32, **options: Any) -> Tensor:
    out = ops.w8a8_gemm(**case.packed, dtype=dtype, **options)
    assert out.dtype == dtype
    slack = 5e-5 if "activation" in options else 2e-6  # the product of gate and up carries the errors of both
    assert_rounded(out, case.expected(**options), slack)
    return out


@pytest.mark.parametrize("in_features", [32, 96, 640])
@pytest.mark.parametrize("out_features", [1, 16, 17, 144, 272])
@pytest.mark.parametrize("tokens", [0, 1, 7, 8, 9, 17, 33, 65, 130])
def test_shapes(tokens: int, out_features: int, in_features: int, device: str) -> None:
    if tokens * out_features * in_features > 2e6:
        in_features = 96
    run_and_check(random_case(tokens, out_features, in_features, device))


def test_many_tiles_of_tokens(device: str) -> None:
    run_and_check(random_case(2100, 144, 32, device))


@pytest.mark.parametrize("in_features", [2080, 4096])
@pytest.mark.parametrize("tokens", [1, 12, 40])
def test_long_sums(tokens: int, in_features: int, device: str) -> None:
    """Several blocks share the inputs of these on a GPU."""
    run_and_check(random_case(tokens, 33, in_features, device, torch.float16))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fusion", FUSIONS)
def test_fusions(fusion: str, dtype: torch.dtype, device: str) -> None:
    for tokens, in_features, vector_dtype in [(1, 1024, torch.float32), (5, 96, dtype), (70, 64, torch.float32)]:
        case = random_case(tokens, 160, in_features, device)
        like = torch.zeros(tokens, 1, dtype=dtype, device=device)
        run_and_check(case, dtype, **gemm_options(fusion, like, 160, vector_dtype))


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("out_features", [64, 32 * 5])
def test_odd_widths_of_a_gate(tokens: int, out_features: int, device: str) -> None:
    run_and_check(random_case(tokens, out_features, 64, device), torch.float16, activation="silu")


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("tokens", [1, 9])
def test_extreme_sums_are_exact(tokens: int, sign: int, device: str) -> None:
    """2^24 is past what fp32 counts in ones, and 2 * 128 * 127 past int16."""
    case = random_case(tokens, 17, 4096, device)
    case.x.fill_(127 * sign)
    case.q.fill_(-128)
    case.q[:, 0] = torch.arange(17)
    case.scales.fill_(1)
    case.x_scales.fill_(1)
    out = run_and_check(case)
    assert_bitwise(out, (case.x.double() @ case.q.double().T).float())


@pytest.mark.parametrize("tokens", [1, 19])
def test_padded_rows_do_not_matter(tokens: int, device: str) -> None:
    case = random_case(tokens, 17, 64, device)
    expected = ops.w8a8_gemm(**case.packed)
    packed = case.packed
    whole = torch.full((32, 64), 77, dtype=torch.int8, device=device)
    whole[:17] = case.q
    packed["qweight"] = ops.int8_pack(whole)
    packed["scales"][1, :, 1:] = torch.nan
    assert_bitwise(ops.w8a8_gemm(**packed), expected)


def test_scales_that_are_not_finite_show_in_their_row_alone(device: str) -> None:
    case = random_case(9, 33, 64, device)
    clean = ops.w8a8_gemm(**case.packed)
    case.x_scales[4] = torch.nan  # as of a row that held one
    out = ops.w8a8_gemm(**case.packed)
    assert out[4].isnan().all()
    others = torch.arange(9) != 4
    assert_bitwise(out[others], clean[others])


@pytest.mark.repeats
@pytest.mark.parametrize("fusion", ["plain", "bias+silu", "residual"])
def test_a_row_does_not_depend_on_its_batch_or_the_threads(fusion: str, device: str) -> None:
    case = random_case(33, 96, 1056, device)
    packed = case.packed
    options = gemm_options(fusion, torch.zeros(33, 1, device=device).bfloat16(), 96, torch.float32)
    one, two = per_thread_count(lambda: ops.w8a8_gemm(**packed, **options))
    assert_bitwise(one, two)
    for size in (1, 8):
        chunks = []
        for start in range(0, 33, size):
            rows = slice(start, start + size)
            part = packed | {"x": case.x[rows], "x_scales": case.x_scales[rows]} | options
            chunks.append(ops.w8a8_gemm(**part | ({"residual": part["residual"][rows]} if "residual" in part else {})))
        assert_bitwise(torch.cat(chunks), one)


def test_quantised_activations_stay_near_the_product(device: str) -> None:
    x, weight = torch.randn(9, 640, device=device), torch.randn(96, 640, device=device)
    q, scales = ops.quantize_int8(weight)
    case = Case(*ops.quantize_int8(x), q, scales[:, None])
    exact = x.double() @ weight.double().T
    out = run_and_check(case)
    assert (out.double() - exact).abs().mean() < 1.5e-2 * exact.abs().mean()


def test_minus_128_is_refused_where_the_host_can_look() -> None:
    case = random_case(3, 17, 64, "cpu")
    case.x[2, 63] = -128
    with pytest.raises(RuntimeError, match=r"\bx\b.*-127"):
        ops.w8a8_gemm(**case.packed)


BAD: dict[str, tuple[str, dict[str, Any]]] = {
    "x dtype": ("x", {"x": torch.zeros(3, 64)}),
    "x inputs": ("x", {"x": torch.zeros(3, 96, dtype=torch.int8)}),
    "x strided": ("x", {"x": torch.zeros(3, 128, dtype=torch.int8)[:, :64]}),
    "x_scales length": ("x_scales", {"x_scales": torch.ones(4)}),
    "x_scales dtype": ("x_scales", {"x_scales": torch.ones(3).half()}),
    "qweight dtype": ("qweight", {"qweight": torch.zeros(2, 2, 8, 16, 4, dtype=torch.uint8)}),
    "qweight unpacked": ("qweight", {"qweight": torch.zeros(32, 64, dtype=torch.int8)}),
    "too many inputs": ("qweight", {"qweight": torch.zeros(2, 4096, 8, 16, 4, dtype=torch.int8)}),
    "scales dtype": ("scales", {"scales": torch.ones(2, 1, 16).bfloat16()}),
    "scales in groups": ("scales", {"scales": torch.ones(2, 2, 16)}),
    "out_features": ("out_features", {"out_features": 33}),
    "half a gate": ("activation|out_features", {"activation": "silu", "out_features": 31}),
    "activation": ("activation", {"activation": "swish"}),
    "activation and residual": ("residual", {"activation": "silu", "residual": torch.zeros(3, 16).bfloat16()}),
    "bias length": ("bias", {"bias": torch.zeros(31)}),
    "bias dtype": ("bias", {"bias": torch.zeros(32).half()}),
    "residual shape": ("residual", {"residual": torch.zeros(2, 32).bfloat16()}),
    "residual dtype": ("residual", {"residual": torch.zeros(3, 32)}),
    "dtype": ("dtype", {"dtype": torch.int32}),
}


@pytest.mark.parametrize("case", BAD)
def test_errors_name_the_argument(case: str) -> None:
    argument, change = BAD[case]
    good = random_case(3, 32, 64, "cpu").packed
    with pytest.raises((RuntimeError, ValueError), match=rf"\b({argument})\b"):
        ops.w8a8_gemm(**(good | change))
