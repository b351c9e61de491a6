"""The linear layer whose 4-bit weights are indices into a table, on the CPU; test_cuda_gemm.py has the GPU's."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support import reference
from support.helpers import (
    DTYPES,
    GEMM_FUSIONS,
    assert_bitwise,
    assert_rounded,
    device_fixture,
    gemm_options,
    per_thread_count,
)
from support.quantized_gemm import BAD, QuantizedGemmTests, QuantizedWeight, random_weight
from torch import Tensor

from fastinfer import ops

device = device_fixture("cpu", "avx512")

TABLE = torch.tensor(
    [-1.0, -0.696, -0.525, -0.395, -0.284, -0.185, -0.091, 0.0, 0.08, 0.161, 0.246, 0.338, 0.441, 0.563, 0.723, 1.0]
)


def weight_of(out_features: int, in_features: int, group: int = 64, **options: Any) -> tuple[dict[str, Any], Tensor]:
    weight = random_weight(4, out_features, in_features, group, mins=False, **options)
    scales = weight.scales.float() * 8
    packed = weight.packed | {"table": TABLE, "scales": ops.pack_scales(scales.to(weight.scales.dtype))}
    del packed["mins"]
    return packed, scales.double().repeat_interleave(group, 1) * TABLE.double()[weight.q.long()]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("tokens", "out_features"), [(0, 16), (1, 1), (3, 49), (33, 100)])
def test_shapes(tokens: int, out_features: int, scale_dtype: torch.dtype, dtype: torch.dtype, device: str) -> None:
    x = torch.randn(tokens, 576).to(dtype)
    packed, dense = weight_of(out_features, 576, scale_dtype=scale_dtype)
    assert_rounded(ops.lut_gemm(x, **packed), reference.gemm(x, dense), slack=1e-5)


@pytest.mark.parametrize("fusion", GEMM_FUSIONS)
def test_fusions(fusion: str, device: str) -> None:
    x = torch.randn(5, 192).bfloat16()
    packed, dense = weight_of(96, 192)
    options = gemm_options(fusion, x, 96, torch.float32)
    assert_rounded(ops.lut_gemm(x, **packed, **options), reference.gemm(x, dense, **options), slack=5e-5)


def test_a_row_does_not_depend_on_its_batch_or_the_threads(device: str) -> None:
    x = torch.randn(33, 576)
    packed, _ = weight_of(100, 576)
    one, two = per_thread_count(lambda: ops.lut_gemm(x, **packed))
    assert_bitwise(one, two)
    for size in (1, 3, 8, 11):
        assert_bitwise(torch.cat([ops.lut_gemm(rows, **packed) for rows in x.split(size)]), one)


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("table", {"table": torch.zeros(15)}),
        ("table", {"table": torch.zeros(16).half()}),
        ("table", {"table": torch.zeros(32)[::2]}),
        ("table|integers", {"activation_bits": 8}),
        ("table|integers", {"activation_bits": 16}),
        ("table|integers", {"activation_bits": 8, "table": torch.arange(113.0, 129.0)}),
        ("table|integers", {"activation_bits": 8, "table": torch.arange(-129.0, -113.0)}),
        ("table|integers", {"activation_bits": 8, "table": torch.full((16,), torch.nan)}),
        ("activation_bits", {"activation_bits": 4, "table": torch.zeros(16)}),
        ("scales", {"scales": torch.ones(1, 4, 16)}),
        ("scales", {"scales": torch.ones(1, 1, 10, 16, dtype=torch.int8)}),
        ("x", {"x": torch.zeros(2, 64)}),
    ],
)
def test_errors_name_the_argument(argument: str, change: dict[str, Any], device: str) -> None:
    packed, _ = weight_of(16, 192)
    with pytest.raises(RuntimeError, match=rf"\b{argument}\b"):
        ops.lut_gemm(**({"x": torch.zeros(2, 192)} | packed | change))


@dataclass
class IntegerTableWeight(QuantizedWeight):
    """A weight whose table has integers."""

    table: Tensor | None = None

    @property
    def dense(self) -> Tensor:
        assert self.table is not None
        return reference.dequantize(self.table[self.q.long()], self.scales, None)

    @property
    def packed(self) -> dict[str, Any]:
        packed = super().packed | {"table": self.table}
        del packed["mins"]
        return packed


class TestTableOfInt8(QuantizedGemmTests):
    """Integer products with all entries that there may be: what int8_gemm does with the entries as its weight."""

    bits = 4
    least, most = -128, 127

    def weight(self, out_features: int, in_features: int, *args: Any, **options: Any) -> QuantizedWeight:
        weight = random_weight(4, out_features, in_features, *args, **options)
        table = torch.randint(self.least, self.most + 1, (16,)).float()
        table[0], table[15] = self.least, self.most
        return IntegerTableWeight(4, weight.q, weight.scales, None, table=table)

    def operator(self, x: Tensor, **arguments: Any) -> Tensor:
        return ops.lut_gemm(x, **arguments)

    @pytest.mark.parametrize("case", [case for case in BAD if "mins" not in case])
    def test_errors_name_the_argument(self, case: str) -> None:
        super().test_errors_name_the_argument(case)

    @pytest.mark.parametrize("tokens", [1, 7, 40])
    def test_is_the_product_of_int8(self, tokens: int, device: str) -> None:
        x, weight = torch.randn(tokens, 96), self.weight(50, 96)
        assert isinstance(weight, IntegerTableWeight)
        assert weight.table is not None
        q = ops.int8_pack(weight.table.to(torch.int8)[weight.q.long()])
        for bits in (8, 16):
            expected = ops.int8_gemm(x, q, ops.pack_scales(weight.scales), None, 50, activation_bits=bits)
            error = (self.run(x, weight, activation_bits=bits) - expected).abs().max()
            assert error <= 1e-5 * expected.abs().mean()


class TestTableOfSmallIntegers(TestTableOfInt8):
    """Entries as small as those of MXFP4 and NVFP4, which have kernels of their own without VNNI."""

    least, most = -16, 16
