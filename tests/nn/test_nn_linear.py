"""Linear and QuantLinear: products, states, moves and errors."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fastinfer.nn import Linear, QuantLinear
from fastinfer.quantize.rounding import NF4_TABLE

KINDS = ["int4", "int8", "nf4"]
# Of the largest weight: half a step of the levels, the coarsest of nf4's included.
STEPS = {"int4": 1 / 15, "int8": 1 / 254, "nf4": 0.152}


def make(
    kind: str, out_features: int = 50, in_features: int = 96, bias: bool = True, **options: Any
) -> tuple[Any, Any]:
    torch.manual_seed(0)
    dense = nn.Linear(in_features, out_features, bias)
    return QuantLinear.from_linear(dense, kind, **options), dense


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group_size", [None, 32, 96])
def test_weights_are_near(kind: str, group_size: int | None) -> None:
    layer, dense = make(kind, group_size=group_size)
    worth = layer.dequantize()
    assert worth.shape == dense.weight.shape
    error = (worth - dense.weight).unflatten(1, (-1, layer.group_size)).abs().amax(-1)
    largest = dense.weight.unflatten(1, (-1, layer.group_size)).abs().amax(-1)
    assert bool((error <= (1.01 * STEPS[kind] + 2**-11) * largest).all())
    assert error.max() > 0


def test_nf4_levels() -> None:
    layer, _ = make("nf4")
    scales = layer.scales.transpose(1, 2).flatten(0, 1)[:50].float()
    levels = layer.dequantize().unflatten(1, (-1, layer.group_size)) / scales[..., None]
    assert (levels[..., None] - NF4_TABLE).abs().amin(-1).max() < 1e-6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", [8, 16, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_product(kind: str, bits: int, dtype: torch.dtype) -> None:
    layer, _ = make(kind, activation_bits=bits)
    layer.to(dtype)
    x = torch.randn(2, 3, 96).to(dtype)
    with torch.no_grad():
        expected = x.double() @ layer.dequantize().double().T + layer.bias.double()
    out = layer(x)
    assert out.dtype == dtype
    exact = bits > 8 or kind == "nf4"
    limit = (2e-2 if dtype == torch.bfloat16 else 1e-4 if exact else 1e-2) * float(expected.abs().max())
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=limit)


@pytest.mark.parametrize("kind", ["dense", *KINDS])
def test_fusions(kind: str) -> None:
    """A norm before, a residual after: the sum of the three alone."""
    torch.manual_seed(0)
    dense = nn.Linear(64, 64)
    layer = Linear.from_linear(dense) if kind == "dense" else QuantLinear.from_linear(dense, kind, activation_bits=32)
    x, residual, norm = torch.randn(2, 3, 64), torch.randn(2, 3, 64), torch.rand(64)
    normed = nn.functional.rms_norm(x, (64,), norm, 1e-6)
    out = layer(x, norm_weight=norm, eps=1e-6, residual=residual)
    torch.testing.assert_close(out, layer(normed) + residual, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_transposed_inputs(kind: str) -> None:
    layer, _ = make(kind)
    x = torch.randn(96, 4).T
    assert torch.equal(layer(x), layer(x.contiguous()))


SIZES = [("dense", 5, 1), *((kind, rows, 96) for kind in ("dense", *KINDS) for rows in (0, 1, 5))]


@pytest.mark.parametrize(("kind", "rows", "columns"), SIZES)
def test_transposed_inputs_of_any_size(kind: str, rows: int, columns: int) -> None:
    """One column, or no row, counts as contiguous, whatever its stride."""
    layer = Linear(columns, 16) if kind == "dense" else QuantLinear.from_linear(nn.Linear(columns, 16), kind)
    x = torch.randn(columns, 5)[:, :rows].T
    copy = torch.empty(rows, columns).copy_(x)
    assert torch.equal(layer(x), layer(copy))
    assert torch.equal(layer(x[:, None]), layer(copy)[:, None])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias", [True, False])
def test_state(kind: str, bias: bool) -> None:
    layer, dense = make(kind, bias=bias)
    state = layer.state_dict()
    assert set(state) == {"qweight", "scales", *["mins"] * (kind == "int4"), *["bias"] * bias}
    other = QuantLinear(96, 50, bias, kind=kind)
    other.load_state_dict(state)
    again = QuantLinear(96, 50, bias, kind=kind)
    again.load_state_dict(dense.state_dict())  # dense weights are quantised
    x = torch.randn(4, 96)
    assert torch.equal(other(x), layer(x))
    assert torch.equal(again(x), layer(x))


@pytest.mark.parametrize("kind", KINDS)
def test_casts_leave_the_packed_weight(kind: str) -> None:
    layer, _ = make(kind)
    before: dict[str, Tensor] = {name: values.clone() for name, values in layer.state_dict().items()}
    layer.bfloat16().half()
    for name, values in layer.state_dict().items():
        if name != "bias":
            assert values.dtype == before[name].dtype
            assert torch.equal(values, before[name])
    assert layer.bias.dtype == torch.half


@pytest.mark.parametrize("kind", KINDS)
def test_from_meta(kind: str) -> None:
    """As loaders do it: made without memory, given memory, then filled."""
    layer, _ = make(kind)
    empty = QuantLinear(96, 50, kind=kind, device="meta").to_empty(device="cpu")
    empty.load_state_dict(layer.state_dict())
    assert torch.equal(empty.dequantize(), layer.dequantize())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dense_state", [True, False])
def test_assigned_to_meta(kind: str, dense_state: bool) -> None:
    """The state's tensors become the layer's, on their own device, as in nn.Linear."""
    layer, dense = make(kind)
    empty = QuantLinear(96, 50, kind=kind, device="meta")
    empty.load_state_dict((dense if dense_state else layer).state_dict(), assign=True)
    x = torch.randn(4, 96)
    assert torch.equal(empty(x), layer(x))


@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_assigned_state_of_a_layer_on_a_gpu(kind: str) -> None:
    """It has the packed weight on the CPU, in the CPU's layout, and all else on the GPU."""
    with FakeTensorMode():
        layer = QuantLinear(96, 50, kind=kind, device="cuda")
        layer.load_state_dict(layer.state_dict(), assign=True)
    assert {buffer.device.type for buffer in layer.buffers()} == {"cuda"}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_table_stays_where_it_is(device: str) -> None:
    layer = QuantLinear(96, 50, kind="nf4", device=device)
    table = layer.table
    state = QuantLinear(96, 50, kind="nf4").state_dict()
    layer.load_state_dict(state, assign=device == "meta")
    assert (layer.table is table) is (device == "cpu")
    assert torch.equal(layer.table, NF4_TABLE)


@pytest.mark.parametrize("kind", KINDS)
def test_made_under_meta(kind: str) -> None:
    with torch.device("meta"):
        layer, x = QuantLinear(96, 50, kind=kind), torch.empty(3, 96)
    assert layer(x).shape == (3, 50)


def test_copied_to_meta() -> None:
    """Nothing to copy into: the warning of nn.Linear."""
    _, dense = make("int4")
    empty = QuantLinear(96, 50, device="meta")
    with pytest.warns(UserWarning, match="copying from a non-meta parameter .* is a no-op") as warnings:
        empty.load_state_dict(dense.state_dict())
    assert {str(warning.message).split()[1] for warning in warnings} == {"qweight:", "scales:", "mins:", "bias:"}
    assert empty.qweight.is_meta


def test_equal_and_large_weights() -> None:
    """A group of one value has no steps, and a row of zeros no scale."""
    dense = nn.Linear(64, 3, bias=False)
    dense.weight.data[0], dense.weight.data[1], dense.weight.data[2] = 0.25, 0.0, -3.0
    for kind in KINDS:
        worth = QuantLinear.from_linear(dense, kind).dequantize()
        torch.testing.assert_close(worth, dense.weight.data, rtol=1e-3, atol=0)


BAD: dict[str, tuple[str, dict[str, Any]]] = {
    "kind": ("kind must be int4, int8, nf4, got 'int3'", {"kind": "int3"}),
    "bits": ("activation_bits must be 8, 16 or 32, got 4", {"activation_bits": 4}),
    "group": ("group_size must be a multiple of 32 that divides in_features, got 64 for 96", {"group_size": 64}),
    "small group": ("multiple of 32", {"group_size": 16}),
    "negative group": ("multiple of 32 that divides in_features, got -32 for 96", {"group_size": -32}),
    "inputs": ("got 32 for 100", {"in_features": 100}),
}


@pytest.mark.parametrize("name", BAD)
def test_errors(name: str) -> None:
    message, options = BAD[name]
    with pytest.raises(ValueError, match=message):
        QuantLinear(**({"in_features": 96, "out_features": 50} | options))


def test_wrong_shape() -> None:
    with pytest.raises(ValueError, match=r"weight must have the shape \(50, 96\), got \(50, 64\)"):
        QuantLinear(96, 50).quantize(torch.zeros(50, 64))
