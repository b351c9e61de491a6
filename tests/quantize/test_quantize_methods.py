"""Quantisation of single weights: what each method promises, on inputs whose features are correlated."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fastinfer.errors import QuantizationError, RequestError
from fastinfer.formats.unpacked import Grouped, Int4, Int8, Lut
from fastinfer.quantize.awq import search_clipping, search_scales
from fastinfer.quantize.calibration import CalibratedWeight
from fastinfer.quantize.gptq import quantize_gptq
from fastinfer.quantize.methods import METHODS, Method
from fastinfer.quantize.rounding import NF4_TABLE, Grid, round_rows, round_to_int8, round_to_nearest, round_to_nf4
from fastinfer.quantize.smoothquant import smoothing_scales
from fastinfer.quantize.statistics import InputStatistics
from fastinfer.quantize.weight import fold_into_rows

ROWS, COLS, GROUP = 48, 128, 32


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weight() -> Tensor:
    return random(ROWS, COLS) / 10


def inputs(tokens: int = 512) -> Tensor:
    """Correlated, some features ten times as large as the others."""
    x = random(tokens, COLS, seed=1) @ (torch.eye(COLS) + random(COLS, COLS, seed=2) / 8)
    x[:, ::37] *= 10
    return x


def statistics() -> InputStatistics:
    return InputStatistics.of(inputs())


def test_statistics_are_the_output_error() -> None:
    x, change = inputs(), random(ROWS, COLS, seed=3)
    expected = (x.double() @ change.double().T).square().sum(1).mean()
    found = InputStatistics.of(x)
    assert found.output_error(change.clone()) == pytest.approx(float(expected), rel=1e-4)
    scales = random(COLS, seed=4).abs() + 0.5
    assert torch.allclose(found.scaled(scales).hessian, InputStatistics.of(x / scales).hessian, rtol=1e-3, atol=1e-4)


def test_the_error_is_relative_to_what_it_is_of() -> None:
    def quantize(found: CalibratedWeight, statistics: InputStatistics | None) -> None:
        found.result = round_to_nearest(found.values, 4, GROUP)

    of_weights, of_outputs = (CalibratedWeight(("a",), weight(), None, quantize) for _ in range(2))
    of_weights.quantize_without_inputs()
    change = round_to_nearest(weight(), 4, GROUP).dequantize() - weight()
    assert of_weights.error == pytest.approx(float(change.norm() / weight().norm()), rel=1e-4)
    of_outputs.linear(inputs())
    expected = (inputs() @ change.T).norm() / (inputs() @ weight().T).norm()
    assert of_outputs.error == pytest.approx(float(expected), rel=1e-3)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_rounding_is_to_the_nearest_level(bits: int, symmetric: bool) -> None:
    values = weight()
    values[3, :GROUP], values[4, :GROUP], values[5, :GROUP] = 0.0, 0.7, -0.3
    found = round_to_nearest(values, bits, GROUP, symmetric)
    assert isinstance(found, Int8 if bits == 8 else Int4)
    grid = Grid.of(values, bits, GROUP, symmetric)
    every = ((torch.arange(2**bits) - grid.zeros[..., None]) * grid.scales[..., None])[:, :, None]
    nearest = (values.unflatten(1, (-1, GROUP))[..., None] - every).abs().amin(-1)
    assert torch.allclose((found.dequantize() - values).abs().unflatten(1, (-1, GROUP)), nearest, atol=1e-6)
    assert (found.dequantize()[3, :GROUP] == 0).all()
    if symmetric and bits == 4:
        assert found.mins is None


def test_int8_rounds_to_half_a_step_of_its_group() -> None:
    values = torch.randn(5, 96, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 2, 96)
    values[1, 32:64] = 0.0
    values[2, 64:] = 1e-7  # its scale is below what fp16 can hold
    quantized = round_to_int8(values, 32)
    assert quantized.q.shape == (5, 96)
    assert quantized.scales.shape == (5, 3)
    scales = quantized.scales.float().repeat_interleave(32, dim=1)
    error = (quantized.q.float() * scales - values).abs()
    assert bool((error <= 0.5 * scales * 1.07 + 1e-6).all())  # the fp16 scale may be too small for the largest
    assert quantized.q.abs().max() == 127


def test_nf4_takes_the_nearest_value() -> None:
    found = round_to_nf4(weight())
    assert isinstance(found, Lut)
    scaled = NF4_TABLE * found.scales[..., None]
    nearest = (weight().unflatten(1, (-1, 64))[..., None] - scaled[:, :, None]).abs().amin(-1)
    assert torch.allclose((found.dequantize() - weight()).abs().unflatten(1, (-1, 64)), nearest, atol=1e-7)
    assert torch.isfinite(round_to_nf4(torch.zeros(2, 64)).dequantize()).all()


@pytest.mark.parametrize("act_order", [False, True])
def test_gptq_with_independent_inputs_is_rounding(act_order: bool) -> None:
    """Nothing can be made good where no input tells of another."""
    independent = InputStatistics(torch.diag(torch.rand(COLS) + 0.5), torch.ones(COLS), torch.ones(COLS))
    found = quantize_gptq(weight(), independent, 4, GROUP, act_order=act_order)
    assert torch.equal(found.dequantize(), round_to_nearest(weight(), 4, GROUP).dequantize())


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("bits", [3, 4])
def test_gptq_lowers_the_output_error(bits: int, act_order: bool) -> None:
    found = quantize_gptq(weight(), statistics(), bits, GROUP, act_order=act_order)
    rounded = round_to_nearest(weight(), bits, GROUP)
    errors = [statistics().output_error(w.dequantize() - weight()) for w in (found, rounded)]
    assert errors[0] < 0.7 * errors[1]


def test_gptq_survives_inputs_that_never_come() -> None:
    x = inputs()
    x[:, 5] = 0
    assert torch.isfinite(quantize_gptq(weight(), InputStatistics.of(x), 4, GROUP).dequantize()).all()


@pytest.mark.parametrize("act_order", [False, True])
def test_gptq_does_not_depend_on_the_unit_of_the_inputs(act_order: bool) -> None:
    """Nor do columns without inputs change how much is added to the diagonal of the others."""
    x = inputs()
    x[:, :GROUP] = 0
    found = [
        quantize_gptq(weight(), InputStatistics.of(x * unit), 4, GROUP, act_order=act_order) for unit in (1, 2**-6)
    ]
    assert torch.equal(found[0].dequantize(), found[1].dequantize())
    alive = quantize_gptq(weight()[:, GROUP:], InputStatistics.of(x[:, GROUP:]), 4, GROUP, act_order=act_order)
    assert torch.equal(found[0].dequantize()[:, GROUP:], alive.dequantize())
    dead = quantize_gptq(weight(), InputStatistics.of(torch.zeros(4, COLS)), 4, GROUP, act_order=act_order)
    assert torch.equal(dead.dequantize(), round_to_nearest(weight(), 4, GROUP).dequantize())


def test_gptq_makes_one_copy_of_the_hessian(monkeypatch: pytest.MonkeyPatch) -> None:
    """The factors replace each other in place, and the statistics stay what they are."""
    pointers, given = [], statistics()
    before = given.hessian.clone()

    def watch(module: Any, name: str) -> None:
        function = getattr(module, name)

        def watched(a: Tensor, out: Tensor) -> Tensor:
            assert a.stride() == (1, COLS)  # otherwise there would be a copy inside
            pointers.extend([a.data_ptr(), out.data_ptr()])
            result: Tensor = function(a, out=out)
            return result

        monkeypatch.setattr(module, name, watched)

    watch(torch.linalg, "cholesky")
    watch(torch, "cholesky_inverse")
    quantize_gptq(weight(), given, 4, GROUP)
    assert len(pointers) == 6
    assert len(set(pointers)) == 1
    assert torch.equal(given.hessian, before)


def test_gptq_refuses_correlations_without_a_decomposition() -> None:
    hessian = statistics().hessian
    hessian[3, 4] = hessian[4, 3] = float("inf")
    with pytest.raises(QuantizationError, match="expected inputs whose correlations have a Cholesky decomposition"):
        quantize_gptq(weight(), InputStatistics(hessian, torch.ones(COLS), torch.ones(COLS)), 4, GROUP)


@pytest.mark.parametrize("symmetric", [False, True])
def test_scales_beyond_fp16_are_refused(symmetric: bool) -> None:
    values = weight()
    values[2, 3] = 2e6
    with pytest.raises(QuantizationError, match=r"whose scales fp16 holds, got a scale of (1\.33|2\.67)e\+05"):
        round_to_nearest(values, 4, GROUP, symmetric)


def test_awq_is_never_worse_than_rounding_and_better_with_outliers() -> None:
    scales = search_scales(weight(), statistics(), 4, GROUP)
    assert scales[::37].mean() > 2 * scales[1::37].mean()
    scaled = round_to_nearest(weight() * scales, 4, GROUP).dequantize() / scales
    rounded = round_to_nearest(weight(), 4, GROUP).dequantize()
    errors = [statistics().output_error(w - weight()) for w in (scaled, rounded)]
    assert errors[0] < 0.8 * errors[1]


def test_awq_leaves_out_factors_whose_scales_fp16_does_not_hold() -> None:
    """The weights themselves fit, and so do they with smaller factors."""
    small = inputs()
    small[:, 0] *= 3e4
    small[:, 1:40] *= 1e-5
    scales = search_scales(weight() * 200, InputStatistics.of(small), 4, GROUP)
    assert scales.isfinite().all()
    round_to_nearest(weight() * 200 * scales, 4, GROUP)


def test_clipping_lowers_each_groups_error() -> None:
    values = weight()
    values[:, ::GROUP] *= 6  # an outlier in every group
    small = inputs()
    small[:, ::GROUP] /= 100  # that hardly matters
    found = InputStatistics.of(small)
    grid = search_clipping(values, found, 3, GROUP)
    clipped, rounded = grid.dequantize(grid.quantize(values)), round_to_nearest(values, 3, GROUP).dequantize()
    assert found.output_error(clipped - values) < 0.8 * found.output_error(rounded - values)


def test_smoothing_evens_out_inputs_and_weights() -> None:
    scales = smoothing_scales(weight(), statistics())
    smooth = inputs().abs().amax(0) / scales
    rough = inputs().abs().amax(0)
    assert smooth.amax() / smooth.amin() < 0.5 * rough.amax() / rough.amin()


@pytest.mark.parametrize("form", ["int4", "int4 symmetric", "int8", "rows"])
def test_folding_divides_the_outputs(form: str) -> None:
    values = weight()
    stored: Grouped = {
        "int4": lambda: round_to_nearest(values, 4, GROUP),
        "int4 symmetric": lambda: round_to_nearest(values, 4, GROUP, symmetric=True),
        "int8": lambda: round_to_nearest(values, 8, COLS),
        "rows": lambda: round_rows(values),
    }[form]()  # type: ignore[assignment]
    scales = random(ROWS, seed=6).abs() + 0.5
    folded = fold_into_rows(stored, scales)
    assert isinstance(folded, Grouped)
    assert torch.equal(folded.q, stored.q)
    assert torch.allclose(folded.dequantize(), stored.dequantize() / scales[:, None], rtol=2e-3, atol=1e-5)
    if folded.mins is not None:  # still a whole number of steps
        zeros = folded.mins / folded.scales.float()
        assert torch.allclose(zeros, zeros.round(), atol=1e-3)


def test_bad_methods() -> None:
    for arguments, message in [
        (("fp4", 4), "method: expected one of rtn, gptq, awq, nf4, int8, w8a8, got 'fp4'"),
        (("gptq", 5), "bits: expected one of .* for gptq, got 5"),
        (("gptq", 4, 48), "group_size: expected a multiple of 32, or -1 for whole rows, got 48"),
        (("nf4", 4, 32, True), "group_size: expected 64 for nf4, got 32"),
        (("w8a8", 8), "symmetric: expected true for w8a8, got false"),
    ]:
        with pytest.raises(RequestError, match=message):
            Method(*arguments)
    assert set(METHODS) == {"rtn", "gptq", "awq", "nf4", "int8", "w8a8"}
