"""The elementwise halves of SwiGLU, also the clamped one, and GeGLU, and activations without a gate, against fp64."""

from collections.abc import Callable

import pytest
import torch
from support import reference
from support.helpers import DTYPES, assert_bitwise, assert_rounded, device_fixture, per_thread_count
from torch import Tensor

from fastinfer import ops

device = device_fixture("cpu", "avx512", "cuda", "emulated")

OPERATORS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "silu": (ops.silu_and_mul, reference.silu_and_mul),
    "limited silu": (lambda x: ops.silu_and_mul(x, 0.7), lambda x: reference.silu_and_mul(x, 0.7)),
    "gelu_tanh": (ops.gelu_and_mul, reference.gelu_and_mul),
    "gelu": (lambda x: ops.gelu_and_mul(x, "none"), lambda x: reference.gelu_and_mul(x, "none")),
    "clamped_swiglu": (ops.clamped_swiglu, reference.clamped_swiglu),
}

APPROXIMATIONS = ["tanh", "none"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("shape", [(0, 14), (1, 2), (2, 14), (19, 222), (3, 3072), (2, 3, 34), (18,)])
def test_activation(shape: tuple[int, ...], name: str, dtype: torch.dtype, device: str) -> None:
    operator, expected = OPERATORS[name]
    x = (3 * torch.randn(shape, device=device)).to(dtype)
    out = operator(x)
    assert out.dtype == dtype
    assert_rounded(out, expected(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPERATORS)
def test_whole_range_of_the_gate(name: str, dtype: torch.dtype, device: str) -> None:
    """Nothing becomes NaN where exp overflows or underflows. Odd length: the vector loop and its tail both see it."""
    operator, expected = OPERATORS[name]
    gate = torch.cat([torch.linspace(-30, 30, 601), torch.tensor([-6e4, -200.0, -88.8, -0.0, 0.0, 88.8, 200.0, 6e4])])
    x = torch.stack([gate, torch.ones_like(gate)]).flatten().to(device, dtype)
    out = operator(x)
    assert out.isfinite().all()
    assert_rounded(out[:601], expected(x)[:601])
    assert_rounded(out[601:], expected(x)[601:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("approximate", APPROXIMATIONS)
@pytest.mark.parametrize("shape", [(0, 7), (1, 1), (2, 7), (19, 111), (3, 3072), (2, 3, 34), (9,), (2, 0)])
def test_gelu(shape: tuple[int, ...], approximate: str, dtype: torch.dtype, device: str) -> None:
    x = (3 * torch.randn(shape, device=device)).to(dtype)
    before = x.clone()
    out = ops.gelu(x, approximate)
    assert out.dtype == dtype
    assert_rounded(out, reference.gelu(x, approximate))
    assert_bitwise(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("approximate", APPROXIMATIONS)
def test_gelu_is_the_gated_one_with_a_gate_of_ones(approximate: str, dtype: torch.dtype, device: str) -> None:
    """Also where exp overflows or underflows, and for NaN, which stays in its element."""
    extremes = torch.tensor([-6e4, -200.0, -88.8, -0.0, 0.0, torch.nan, 88.8, 200.0, 6e4])
    x = torch.cat([extremes, torch.linspace(-30, 30, 601), extremes]).to(device, dtype)
    out = ops.gelu(x, approximate)
    assert_bitwise(out, ops.gelu_and_mul(torch.cat([x, torch.ones_like(x)]), approximate))
    assert_bitwise(out.isnan(), x.isnan())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 7), (1, 1), (19, 111), (3, 3072), (2, 3, 34), (2, 0)])
def test_relu2(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    x = torch.randn(shape, device=device).to(dtype)
    out = ops.relu2(x)
    assert out.dtype == dtype
    assert_rounded(out, reference.relu2(x))
    assert_bitwise(ops.relu2(x, out=x), out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factors", [(0.81, 1.3), (0.02, 0.5), (3.5, 6.0, 0.25, -0.5), (1.0, 1.0, 0.0, 0.0)])
@pytest.mark.parametrize("shape", [(0, 7), (1, 1), (19, 111), (3, 3072), (2, 3, 34), (2, 0)])
def test_xielu(shape: tuple[int, ...], factors: tuple[float, ...], dtype: torch.dtype, device: str) -> None:
    x = torch.randn(shape, device=device).to(dtype)
    out = ops.xielu(x, *factors)
    assert out.dtype == dtype
    assert_rounded(out, reference.xielu(x, *factors))
    assert_bitwise(ops.xielu(x, *factors, out=x), out)


@pytest.mark.parametrize("dtype", DTYPES)
def test_whole_range_of_xielu(dtype: torch.dtype, device: str) -> None:
    """Where exp underflows, around the end of the series, and where expm1 would lose its digits; NaN stays."""
    small = torch.tensor([-1e-7, -1e-6, -3e-6, -1e-4, -1e-3, -0.02, -0.0, 0.0, 1e-7, torch.nan, 1e-3])
    large = torch.tensor([-2e4, -200.0, -88.0])
    x = torch.cat([large, torch.linspace(-30, 30, 601), torch.linspace(-1.5, 0, 99), small]).to(device, dtype)
    out, expected = ops.xielu(x, 0.81, 2.5), reference.xielu(x, 0.81, 2.5)
    assert_bitwise(out.isnan(), x.isnan())
    for part in (slice(3), slice(3, -11), slice(-11, -2)):  # of like sizes
        assert_rounded(out[part], expected[part])


def test_a_small_input_of_xielu_keeps_its_digits(device: str) -> None:
    x = -torch.logspace(-6, 0, 200, device=device)
    expected = reference.xielu(x, 1.0, 1.3)
    assert ((ops.xielu(x, 1.0, 1.3) - expected) / expected).abs().max() < 1e-6


def test_relu2_keeps_nan_in_its_element(device: str) -> None:
    x = torch.tensor([-torch.inf, -1.0, -0.0, torch.nan, 2.0, torch.inf], device=device)
    assert ops.relu2(x).nan_to_num(7.0, posinf=9.0).tolist() == [0.0, 0.0, 0.0, 7.0, 4.0, 9.0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_limits_of_the_clamped_swiglu(dtype: torch.dtype, device: str) -> None:
    """A gate above 7, and up beyond either limit, are as good as the limit; a gate below -7 stays."""
    limits = torch.tensor([-torch.inf, -100.0, -7.5, -7.0, -6.5, -1.0, 0.0, 6.5, 7.0, 7.5, 100.0, torch.inf])
    gate, up = torch.meshgrid(limits[1:], limits, indexing="ij")
    x = torch.stack([gate.flatten(), up.flatten()]).flatten().to(device, dtype)
    out = ops.clamped_swiglu(x)
    assert_rounded(out, reference.clamped_swiglu(x))
    clamped = torch.stack([gate.clamp(max=7).flatten(), up.clamp(-7, 7).flatten()]).flatten().to(device, dtype)
    assert_bitwise(out, ops.clamped_swiglu(clamped))
    assert len(out.unique()) > 20


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("limit", [0.25, 7.0, 1e30])
def test_limits_of_silu(limit: float, dtype: torch.dtype, device: str) -> None:
    """The activated gate has no lower limit; a limit that nothing reaches changes no bit."""
    edges = torch.tensor([-torch.inf, -100.0, -7.5, -7.0, -1.3, -0.25, 0.0, 0.2, 0.5, 6.5, 7.0, 7.5, 100.0, torch.inf])
    gate, up = torch.meshgrid(edges[1:], edges, indexing="ij")
    x = torch.stack([gate.flatten(), up.flatten()]).flatten().to(device, dtype)
    out, expected = ops.silu_and_mul(x, limit), reference.silu_and_mul(x, limit)
    if limit < 1e30:
        assert_rounded(out, expected)
        assert out.abs().max() <= max(limit, 0.279) * limit  # silu is at least -0.279
    else:
        finite = torch.randn(2, 38, device=device).to(dtype)
        assert_bitwise(ops.silu_and_mul(finite, limit), ops.silu_and_mul(finite))


@pytest.mark.parametrize("limit", [0.0, -1.0, float("inf"), float("nan"), 1e39])
def test_bad_limits_of_silu(limit: float) -> None:
    with pytest.raises(RuntimeError, match=r"^silu_and_mul: limit must be positive and finite in fp32, got"):
        ops.silu_and_mul(torch.zeros(2, 8), limit)


@pytest.mark.parametrize("name", OPERATORS)
def test_nan_stays_in_its_element(name: str, device: str) -> None:
    x = torch.randn(2, 38, device=device)
    x[0, 5] = x[1, 18 + 19] = torch.nan
    assert OPERATORS[name][0](x).isnan().nonzero().tolist() == [[0, 5], [1, 18]]


@pytest.mark.repeats
@pytest.mark.parametrize("name", OPERATORS)
def test_a_row_does_not_depend_on_its_batch_or_the_threads(name: str, device: str) -> None:
    operator = OPERATORS[name][0]
    x = torch.randn(99, 1110, device=device)
    one, two = per_thread_count(lambda: operator(x))
    assert_bitwise(one, two)
    assert_bitwise(torch.cat([operator(row) for row in x.split(1)]), one)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("approximate", ["tanh", "none"])
@pytest.mark.parametrize("shape", [(0, 7), (2, 7), (19, 256), (3, 2048)])
def test_gelu_times_a_factor(shape: tuple[int, int], approximate: str, dtype: torch.dtype, device: str) -> None:
    """A factor whose rows are apart: what is between them is not read."""
    x = torch.randn(shape, device=device).to(dtype)
    factors = torch.full((shape[0], 3 * shape[1]), torch.nan, device=device, dtype=dtype)
    factor = factors[:, shape[1] : 2 * shape[1]].copy_(torch.randn(shape, device=device))
    expected = reference.gelu(x, approximate) * factor.double()
    assert_rounded(ops.gelu(x, approximate, factor), expected)
    assert_rounded(ops.gelu(x, approximate, factor, out=x), expected)


X = torch.zeros(2, 8)


@pytest.mark.parametrize(
    ("x", "factor"),
    [(X, torch.zeros(2, 7)), (X, X.half()), (X, torch.zeros(2, 16)[:, ::2]), (X[None], X[None])],
)
def test_gelu_errors_name_the_factor(x: Tensor, factor: Tensor) -> None:
    with pytest.raises(RuntimeError, match=r"^gelu: .*factor"):
        ops.gelu(x, factor=factor)


@pytest.mark.parametrize("x", [torch.zeros(2, 8).int(), torch.zeros(2, 16)[:, :8]], ids=["dtype", "strided"])
def test_errors_of_relu2_name_x(x: Tensor) -> None:
    with pytest.raises(RuntimeError, match=r"^relu2: x\b"):
        ops.relu2(x)


@pytest.mark.parametrize(
    ("x", "arguments", "message"),
    [
        (torch.zeros(2, 8).int(), (1.0, 1.0), r"x must be"),
        (torch.zeros(2, 16)[:, :8], (1.0, 1.0), r"x must be"),
        (torch.zeros(2, 8), (1e39, 1.0), r"positive must be finite in fp32, got 1e\+39"),
        (torch.zeros(2, 8), (1.0, float("nan")), r"negative must be finite in fp32, got nan"),
        (torch.zeros(2, 8), (1.0, 1.0, float("inf")), r"beta must be finite in fp32, got inf"),
        (torch.zeros(2, 8), (1.0, 1.0, 0.5, 1e-6), r"eps must be in -1 .. 0, got 1e-06"),
    ],
)
def test_errors_of_xielu(x: Tensor, arguments: tuple[float, ...], message: str) -> None:
    with pytest.raises(RuntimeError, match=rf"^xielu: {message}"):
        ops.xielu(x, *arguments)


@pytest.mark.parametrize("operator", [ops.silu_and_mul, ops.gelu_and_mul, ops.clamped_swiglu])
@pytest.mark.parametrize(
    "x",
    [torch.zeros(2, 7), torch.zeros(2, 8).int(), torch.zeros(2, 16)[:, :8], torch.tensor(1.0)],
    ids=["odd", "dtype", "strided", "scalar"],
)
def test_errors_name_x(operator: Callable[[Tensor], Tensor], x: Tensor) -> None:
    with pytest.raises((RuntimeError, ValueError), match=r"\bx\b"):
        operator(x)


@pytest.mark.parametrize("x", [torch.zeros(2, 8).int(), torch.zeros(2, 16)[:, :8]], ids=["dtype", "strided"])
def test_gelu_errors_name_x(x: Tensor) -> None:
    with pytest.raises((RuntimeError, ValueError), match=r"^gelu: x\b"):
        ops.gelu(x)


@pytest.mark.parametrize("operator", [ops.gelu_and_mul, ops.gelu])
def test_unknown_approximation_is_refused(operator: Callable[[Tensor, str], Tensor]) -> None:
    with pytest.raises((RuntimeError, ValueError), match="approximate"):
        operator(torch.zeros(2, 8), "fast")
