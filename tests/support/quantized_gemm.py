"""The tests that int4_gemm to int8_gemm share; a subclass in each operator's file names the bits."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from fastinfer import _C, ops
from support import reference
from support.helpers import (
    DTYPES,
    GEMM_FUSIONS,
    Guarded,
    assert_bitwise,
    assert_rounded,
    gemm_options,
    per_thread_count,
)


@dataclass
class QuantizedWeight:
    """A random weight: unpacked integers, and what the operators take.

    Two-level scales and minimums are their products in fp32, and packed from ``two_level``: integers and factors.
    """

    bits: int
    q: Tensor
    scales: Tensor
    mins: Tensor | None
    two_level: tuple[tuple[Tensor, Tensor], ...] = ()

    @property
    def dense(self) -> Tensor:
        offset = 2 ** (self.bits - 1) if self.bits < 6 and self.mins is None else 0
        return reference.dequantize(self.q, self.scales, self.mins, offset)

    @property
    def packed(self) -> dict[str, Any]:
        scales, mins = ops.pack_scales(self.scales), None if self.mins is None else ops.pack_scales(self.mins)
        if self.two_level:
            scales, mins = (*(ops.pack_two_level_scales(*both) for both in self.two_level), None)[:2]
        qweight = getattr(ops, f"int{self.bits}_pack")(self.q)  # the device's own layout
        packed = {"qweight": qweight, "scales": scales, "mins": mins, "out_features": self.q.shape[0]}
        if self.bits == 6:
            del packed["mins"]
        return packed


def random_weight(
    bits: int,
    out_features: int,
    in_features: int,
    group: int = 32,
    scale_dtype: torch.dtype = torch.float16,
    mins: bool = True,
    device: str = "cpu",
    two_level: bool = False,
) -> QuantizedWeight:
    """Values of the size of 1 / sqrt(in_features); mins that shift them by about half their spread."""
    low, high = {4: (0, 16), 5: (0, 32), 6: (-32, 32), 8: (-128, 128)}[bits]
    q = torch.randint(low, high, (out_features, in_features), device=device).to(torch.uint8 if bits < 6 else torch.int8)
    spread = in_features**-0.5
    if two_level or bits == 6:
        group = 16 if bits == 6 else 32
        both = (spread * 4 / 2**bits, spread)[: 1 + (mins and bits < 6)]
        stored = tuple(random_two_level(out_features, in_features, group, size) for size in both)
        scales, shifts = (*(i * f.float().repeat_interleave(256 // group, 1) for i, f in stored), None)[:2]
        return QuantizedWeight(bits, q, scales, shifts, stored)
    shape = (out_features, in_features // group)
    scales = (torch.rand(shape, device=device) + 0.5) * spread * 4 / 2**bits
    shift = torch.randn(shape, device=device) * spread if mins else None
    return QuantizedWeight(bits, q, scales.to(scale_dtype), None if shift is None else shift.to(scale_dtype))


def random_two_level(out_features: int, in_features: int, group: int, size: float) -> tuple[Tensor, Tensor]:
    """Integers and factors of numbers of both signs, up to some size."""
    integers = torch.randint(-128, 128, (out_features, in_features // group)).to(torch.int8)
    return integers, ((torch.rand(out_features, in_features // 256) + 0.5) * size / 128).half()


# The weight of the good call is [32, 64] in groups of 32, the input [3, 64].
BAD: dict[str, tuple[str, dict[str, Any]]] = {
    "x dtype": ("x", {"x": torch.zeros(3, 64).double()}),
    "x 1-d": ("x", {"x": torch.zeros(64)}),
    "x columns strided": ("x", {"x": torch.zeros(64, 3).T}),
    "in_features": ("x|qweight", {"x": torch.zeros(3, 96)}),
    "qweight dtype": ("qweight", {"qweight": torch.zeros(2, 2, 4, 16, 4)}),
    "qweight unpacked": ("qweight", {"qweight": torch.zeros(32, 64, dtype=torch.uint8)}),
    "scales dtype": ("scales", {"scales": torch.ones(2, 2, 16, dtype=torch.bfloat16)}),
    "scales tiles": ("scales", {"scales": torch.ones(1, 2, 16)}),
    "scales unpacked": ("scales", {"scales": torch.ones(32, 2)}),
    "group does not divide": ("scales", {"scales": torch.ones(2, 3, 16)}),
    "group below 32": ("scales", {"scales": torch.ones(2, 4, 16)}),
    "no groups": ("scales", {"scales": torch.ones(2, 0, 16)}),
    "mins shape": ("mins", {"mins": torch.ones(2, 1, 16)}),
    "mins dtype is not that of scales": ("mins", {"mins": torch.ones(2, 2, 16).half()}),
    "out_features past the tiles": ("out_features", {"out_features": 33}),
    "out_features leaves a tile out": ("out_features", {"out_features": 16}),
    "out_features negative": ("out_features", {"out_features": -1}),
    "bias length": ("bias", {"bias": torch.zeros(31)}),
    "norm_weight length": ("norm_weight", {"norm_weight": torch.zeros(32)}),
    "residual shape": ("residual", {"residual": torch.zeros(3, 64)}),
    "residual dtype": ("residual", {"residual": torch.zeros(3, 32).half()}),
    "unknown activation": ("activation", {"activation": "swish"}),
    "activation and residual": ("residual", {"activation": "silu", "residual": torch.zeros(3, 16)}),
    "activation_bits": ("activation_bits", {"activation_bits": 4}),
    "qweight empty": ("qweight", {"qweight": torch.zeros(2, 0, 4, 16, 4, dtype=torch.uint8)}),
    "half a gate": ("activation|out_features", {"activation": "silu", "out_features": 31}),
}


class QuantizedGemmTests:
    """Accuracy, quantised activations, invariances and errors of one operator."""

    bits: int
    two_level = False  # whether scales are; there are always 256 inputs then, or a multiple
    vnni: bool  # whether the kernels under test have AVX-512 VNNI, or emulate it

    @pytest.fixture(autouse=True)
    def _note_instructions(self, request: pytest.FixtureRequest) -> None:
        device = getattr(request.node, "callspec", None) and request.node.callspec.params.get("device")
        self.vnni = device == "avx512" or (device == "cpu" and _C.cpu_info()["isa"].startswith(("avx512", "amx")))

    def width(self, in_features: int) -> int:
        return -(-in_features // 256) * 256 if self.two_level else in_features

    def weight(self, out_features: int, in_features: int, *args: Any, **options: Any) -> QuantizedWeight:
        options["two_level"] = self.two_level
        return random_weight(self.bits, out_features, self.width(in_features), *args, **options)

    def operator(self, x: Tensor, **arguments: Any) -> Tensor:
        return getattr(ops, f"int{self.bits}_gemm")(x, **arguments)

    def run(self, x: Tensor, weight: QuantizedWeight, **options: Any) -> Tensor:
        return self.operator(x, **weight.packed, **options)

    def assert_exact(self, x: Tensor, weight: QuantizedWeight, **options: Any) -> None:
        """Without quantised activations: fp32 arithmetic on the dequantised weight, rounded once."""
        out = self.run(x, weight, **options)
        assert out.dtype == x.dtype
        slack = 5e-5 if "activation" in options else 1e-5  # the product of gate and up carries the errors of both
        assert_rounded(out, reference.gemm(x, weight.dense, **options), slack)

    def assert_quantized(self, x: Tensor, weight: QuantizedWeight, **options: Any) -> None:
        """With quantised activations: tightly against their documented rounding, but for rows with a near tie.

        An element that rounds to its other neighbour moves its whole row by 1e-3 or so; in fp16 and bf16 exact ties are
        common.
        """
        out = self.run(x, weight, activation_bits=8, **options)
        assert out.dtype == x.dtype
        expected = reference.gemm(x, weight.dense, activation_bits=8, **options)
        norm_weight = options.get("norm_weight")
        rounded = x if norm_weight is None else reference.rms_norm(x, norm_weight, options["eps"])
        rounding = 0.5 * torch.finfo(x.dtype).eps * expected.abs() + self.lost_sums(rounded, weight, **options)
        error = ((out.double() - expected).abs() - rounding).amax(1) / expected.abs().mean()
        assert error.max() < 5e-2
        sure = error[~reference.near_ties(rounded)]
        assert not len(sure) or sure.max() < 2e-5, f"error {sure.max():.2g} of the mean magnitude"

    def lost_sums(self, x: Tensor, weight: QuantizedWeight, **options: Any) -> Tensor:
        """What sums of 8-bit products may lose with AVX-512 VNNI: 0.75 of a step of the second run of each block, see
        ByteRun in csrc/common/cpu/dot.h. [tokens, out_features]."""
        scales = weight.scales.double().abs()[:, :: 2 if self.bits == 6 else 1]
        scales = scales.repeat_interleave(x.shape[1] // scales.shape[1] // 32, 1)
        lost = 0.75 * reference.activation_steps(x)[1][:, 1::2, 0] @ scales.T
        if not self.vnni or self.bits == 6:
            lost.zero_()
        if "activation" not in options:
            return lost
        bias = {name: value for name, value in options.items() if name == "bias"}
        sums = reference.gemm(x, weight.dense, activation_bits=8, **bias)
        (gate, up), (lost_gate, lost_up) = (t.unflatten(1, (-1, 2, 16)).unbind(2) for t in (sums, lost))
        if options["activation"] == "clamped_swiglu":
            up = up + 1
        # No slope is steeper than 1.13, no gate's absolute value is larger than the gate's own.
        return (1.13 * lost_gate * (up.abs() + lost_up) + gate.abs() * lost_up).flatten(1)

    def assert_nearly_exact(self, x: Tensor, weight: QuantizedWeight, **options: Any) -> None:
        """With activations in 14 bits: steps of 1/8191 of a run's largest are below what most uses of fp32 notice."""
        out = self.run(x, weight, activation_bits=16, **options)
        assert out.dtype == x.dtype
        slack = 5e-3 if "activation" in options else 1e-3
        assert_rounded(out, reference.gemm(x, weight.dense, **options), slack)

    @pytest.mark.parametrize("in_features", [32, 64, 576, 1792])
    @pytest.mark.parametrize("out_features", [1, 15, 16, 17, 96, 1000])
    @pytest.mark.parametrize("tokens", [1, 2, 3, 5, 17, 130])
    def test_shapes(self, tokens: int, out_features: int, in_features: int, device: str) -> None:
        if tokens * out_features * in_features > 3e7:
            tokens = 19
        x = torch.randn(tokens, self.width(in_features), device=device)
        weight = self.weight(out_features, in_features, device=device)
        self.assert_exact(x, weight)
        self.assert_quantized(x, weight)
        if out_features > 1:  # errors are compared with the mean magnitude: one sum alone may be near zero
            self.assert_nearly_exact(x, weight)

    @pytest.mark.parametrize("activation_bits", [32, 16, 8])
    def test_no_tokens(self, activation_bits: int, device: str) -> None:
        weight = self.weight(17, 64, device=device)
        out = self.run(torch.randn(0, self.width(64), device=device), weight, activation_bits=activation_bits)
        assert out.shape == (0, 17)

    @pytest.mark.parametrize("mins", [False, True])
    @pytest.mark.parametrize("scale_dtype", [torch.float16, torch.float32])
    @pytest.mark.parametrize("group", [32, 64, 128, 384])
    def test_groups(self, group: int, scale_dtype: torch.dtype, mins: bool, device: str) -> None:
        weight = self.weight(49, 384, group, scale_dtype, mins, device)
        for tokens in (1, 2, 33):
            x = torch.randn(tokens, self.width(384), device=device)
            self.assert_exact(x, weight)
            self.assert_quantized(x, weight)
            self.assert_nearly_exact(x, weight)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("fusion", GEMM_FUSIONS)
    def test_fusions(self, fusion: str, dtype: torch.dtype, device: str) -> None:
        weight = self.weight(96, 576, device=device)
        for tokens, vector_dtype in [(1, torch.float32), (5, dtype), (33, torch.float32)]:
            x = torch.randn(tokens, self.width(576), device=device).to(dtype)
            options = gemm_options(fusion, x, 96, vector_dtype)
            self.assert_exact(x, weight, **options)
            self.assert_quantized(x, weight, **options)
            self.assert_nearly_exact(x, weight, **options)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_quantized_activations_stay_near_the_exact_product(self, dtype: torch.dtype, device: str) -> None:
        x = torch.randn(33, self.width(576), device=device).to(dtype)
        weight = self.weight(1000, 576, device=device)
        out, exact = self.run(x, weight, activation_bits=8), reference.gemm(x, weight.dense)
        assert (out.double() - exact).abs().mean() < 1.5e-2 * exact.abs().mean()

    @pytest.mark.parametrize(("activation_bits", "largest"), [(8, 127), (16, 8191)])
    def test_representable_activations_lose_nothing(self, activation_bits: int, largest: int, device: str) -> None:
        """Integers with the largest one in every run have scale 1: sums then lose what they always do, and no more."""
        x = torch.randint(-largest, largest + 1, (33, self.width(576)), device=device).float()
        x[:, ::16] = largest
        weight = self.weight(49, 576, device=device)
        out, expected = self.run(x, weight, activation_bits=activation_bits), reference.gemm(x, weight.dense)
        lost = self.lost_sums(x, weight) if activation_bits == 8 else 0.0
        assert ((out - expected).abs() <= lost + 1e-5 * (expected.abs() + expected.abs().mean())).all()

    def test_activations_round_half_to_even(self, device: str) -> None:
        x = torch.arange(-126.0, 126.0, device=device)[:224].reshape(7, 32).repeat(1, self.width(32) // 32) + 0.5
        x[:, ::16] = 127
        weight = self.weight(17, 32, device=device)
        out, expected = self.run(x, weight, activation_bits=8), reference.gemm(x.round(), weight.dense)
        lost = self.lost_sums(x, weight)
        assert ((out - expected).abs() <= lost + 1e-5 * (expected.abs() + expected.abs().mean())).all()

    def test_zero_and_tiny_blocks(self, device: str) -> None:
        """A block of zeros has no scale to divide by; one below fp16's range keeps its own scale."""
        x = torch.randn(5, self.width(128), device=device)
        x[0] = 0
        x[1, 32:64] = 0
        x[2, 64:96] *= 1e-12
        x[3] *= 1e-30
        x[4, :16] *= 1e-40  # its scale's reciprocal is no finite number
        weight = self.weight(17, 128, device=device)
        out = self.run(x, weight, activation_bits=8)
        assert out[0].eq(0).all()
        expected = reference.gemm(x, weight.dense, activation_bits=8)
        for row in range(1, 5):
            error = (out[row].double() - expected[row]).abs().max()
            assert error < 2e-3 * expected[row].abs().mean()

    @pytest.mark.parametrize("activation_bits", [32, 16, 8])
    def test_nan_shows_in_its_row_alone(self, activation_bits: int, device: str) -> None:
        x = torch.randn(19, self.width(64), device=device)
        weight = self.weight(33, 64, device=device)
        clean = self.run(x, weight, activation_bits=activation_bits)
        for row, value in [(3, torch.nan), (7, torch.inf), (11, -torch.inf)]:
            x[row, 40 + row] = value
        out = self.run(x, weight, activation_bits=activation_bits)
        for row in range(19):
            if row in (3, 7, 11):
                assert not out[row].isfinite().any(), f"row {row} hides its {x[row, 40 + row]}"
            else:
                assert_bitwise(out[row], clean[row])

    @pytest.mark.parametrize("sign", [1, -1])
    @pytest.mark.parametrize("tokens", [1, 19])
    def test_integer_sums_do_not_saturate(self, tokens: int, sign: int, device: str) -> None:
        """Extreme weights times extreme activations: 2 * 255 * 127 is past int16, where pairs may be added."""
        low, high = {4: (0, 15), 5: (0, 31), 6: (-32, 31), 8: (-128, 127)}[self.bits]
        for value in (low, high):
            weight = self.weight(33, 1536, group=1536, mins=False, device=device)
            weight.q.fill_(value)
            x = torch.full((tokens, 1536), 2.0 * sign, device=device)
            for activation_bits in (8, 16):
                out = self.run(x, weight, activation_bits=activation_bits)
                assert_rounded(out, reference.gemm(x, weight.dense), slack=1e-5)

    @pytest.mark.parametrize("activation_bits", [32, 16, 8])
    def test_padded_rows_do_not_matter(self, activation_bits: int, device: str) -> None:
        """Whatever stands behind out_features in the last tile, NaN scales too, is never written out."""
        weight = self.weight(17, 64, device=device)
        x = torch.randn(5, self.width(64), device=device)
        expected = self.run(x, weight, activation_bits=activation_bits)
        packed = weight.packed
        for numbers in (packed["scales"], packed.get("mins")):
            if numbers is not None and self.two_level:
                numbers[1].flatten(1)[:, 2:32] = -1  # bytes of NaNs: all factors but the first row's
            elif numbers is not None:
                numbers[1, :, 1:] = torch.nan
        packed["qweight"][1, :, :, 1:] = 77
        assert_bitwise(self.operator(x, **packed, activation_bits=activation_bits), expected)

    @pytest.mark.parametrize("activation_bits", [32, 16, 8])
    @pytest.mark.parametrize("tokens", [1, 19])
    def test_strided_rows(self, tokens: int, activation_bits: int, device: str) -> None:
        x = torch.randn(tokens, self.width(64), device=device)
        weight = self.weight(33, 64, device=device)
        expected = self.run(x, weight, activation_bits=activation_bits)
        out = self.run(Guarded(x).view, weight, activation_bits=activation_bits)
        assert_bitwise(out, expected)

    @pytest.mark.parametrize("activation_bits", [32, 16, 8])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("fusion", ["plain", "norm+silu", "norm+bias", "residual"])
    def test_a_row_does_not_depend_on_its_batch_or_the_threads(
        self, fusion: str, dtype: torch.dtype, activation_bits: int, device: str
    ) -> None:
        x = torch.randn(33, self.width(576), device=device).to(dtype)
        weight = self.weight(96, 576, device=device)
        options = gemm_options(fusion, x, 96, torch.float32) | {"activation_bits": activation_bits}
        one, two = per_thread_count(lambda: self.run(x, weight, **options))
        assert_bitwise(one, two)
        for size in (1, 3, 8):
            chunks = [
                self.run(rows, weight, **options | ({"residual": residual} if "residual" in options else {}))
                for rows, residual in zip(x.split(size), options.get("residual", x).split(size), strict=True)
            ]
            assert_bitwise(torch.cat(chunks), one)

    @pytest.mark.parametrize("activation", [None, "silu"])
    @pytest.mark.parametrize("activation_bits", [32, 16, 8])
    def test_units_that_are_finished_together(self, activation_bits: int, activation: str | None, device: str) -> None:
        """With up to eight rows the sums of eight units; here there are 34 or 17, on one thread and on two."""
        x = torch.randn(9, self.width(64), device=device)
        weight = self.weight(544, 64, device=device)
        options = {"bias": torch.randn(544), "activation": activation, "activation_bits": activation_bits}
        expected = self.run(x, weight, **options)
        for size in (1, 8):
            run = partial(lambda size: torch.cat([self.run(rows, weight, **options) for rows in x.split(size)]), size)
            for out in per_thread_count(run):
                assert_bitwise(out, expected)

    @pytest.mark.parametrize(
        ("out_features", "group", "mins", "activation"),
        [(48, 32, True, None), (64, 160, False, None), (64, 160, True, "silu")],
    )
    def test_many_rows_in_several_parts(
        self, out_features: int, group: int, mins: bool, activation: str | None, device: str
    ) -> None:
        """More rows (192) and inputs (12 of the 25 blocks, within a group) than a kernel unpacks weights for at once;
        tiles in pairs, and one without another."""
        x = torch.randn(192 + 25, self.width(800), device=device)
        weight = self.weight(out_features, 800, group, mins=mins, device=device)
        options = {} if activation is None else {"activation": activation}
        self.assert_exact(x, weight, **options)
        self.assert_quantized(x, weight, **options)
        self.assert_nearly_exact(x, weight, **options)
        for activation_bits in (32, 16, 8):
            alone = [self.run(rows, weight, activation_bits=activation_bits, **options) for rows in x.split(7)]
            assert_bitwise(torch.cat(alone), self.run(x, weight, activation_bits=activation_bits, **options))

    @pytest.mark.parametrize("case", BAD)
    def test_errors_name_the_argument(self, case: str) -> None:
        argument, change = BAD[case]
        good = self.weight(32, 64, scale_dtype=torch.float32).packed | {"x": torch.zeros(3, 64)}
        with pytest.raises((RuntimeError, ValueError), match=rf"\b({argument})\b"):
            self.operator(**(good | change))


# The weight of the good call is [32, 512], the input [3, 512].
BAD_TWO_LEVEL: dict[str, tuple[str, dict[str, Any]]] = {
    "x dtype": ("x", {"x": torch.zeros(3, 512).double()}),
    "in_features": ("x|qweight", {"x": torch.zeros(3, 256)}),
    "qweight dtype": ("qweight", {"qweight": torch.zeros(2, 16, 6, 16, 4, dtype=torch.int8)}),
    "qweight unpacked": ("qweight", {"qweight": torch.zeros(32, 512, dtype=torch.uint8)}),
    "qweight without whole factors": ("in_features|qweight", {"qweight": torch.zeros(2, 15, 4, 16, 4).byte()}),
    "scales unpacked": ("scales", {"scales": torch.zeros(32, 32, dtype=torch.int8)}),
    "scales dtype": ("scales", {"scales": torch.zeros(2, 2, 18, 16)}),
    "scales of other groups": ("scales", {"scales": torch.zeros(2, 2, 6, 16, dtype=torch.int8)}),
    "scales tiles": ("scales", {"scales": torch.zeros(1, 2, 18, 16, dtype=torch.int8)}),
    "scales strided": ("scales", {"scales": torch.zeros(2, 2, 16, 18, dtype=torch.int8).transpose(2, 3)}),
    "out_features": ("out_features", {"out_features": 33}),
    "bias length": ("bias", {"bias": torch.zeros(31)}),
    "activation_bits": ("activation_bits", {"activation_bits": 6}),
}


class TwoLevelGemmTests(QuantizedGemmTests):
    """The same with two-level scales."""

    two_level = True

    @pytest.mark.parametrize("mins", [False, True])
    def test_groups(self, mins: bool, device: str) -> None:  # type: ignore[override]
        weight = self.weight(49, 768, mins=mins, device=device)
        for tokens in (1, 2, 33):
            x = torch.randn(tokens, 768, device=device)
            self.assert_exact(x, weight)
            self.assert_quantized(x, weight)
            self.assert_nearly_exact(x, weight)

    @pytest.mark.parametrize("case", BAD_TWO_LEVEL)
    def test_errors_name_the_argument(self, case: str) -> None:
        argument, change = BAD_TWO_LEVEL[case]
        good = self.weight(32, 512).packed | {"x": torch.zeros(3, 512)}
        with pytest.raises((RuntimeError, ValueError), match=rf"\b({argument})\b"):
            self.operator(**(good | change))

    @pytest.mark.parametrize("sign", [1, -1])
    @pytest.mark.parametrize("tokens", [1, 19])
    def test_integer_sums_do_not_saturate(self, tokens: int, sign: int, device: str) -> None:
        """The largest weights, scales and multipliers of activations at once."""
        weight = self.weight(33, 1536, mins=False, device=device)
        ((integers, factors),) = weight.two_level
        low, high = {4: (0, 15), 5: (0, 31), 6: (-32, 31)}[self.bits]
        for q, integer in ((low, -128), (high, -128), (high, 127)):
            weight.q.fill_(q)
            integers.fill_(integer)
            weight.scales = integer * factors.float().repeat_interleave(integers.shape[1] // factors.shape[1], 1)
            x = torch.full((tokens, 1536), 2.0 * sign, device=device)
            for activation_bits in (8, 16):
                out = self.run(x, weight, activation_bits=activation_bits)
                assert_rounded(out, reference.gemm(x, weight.dense), slack=1e-5)
