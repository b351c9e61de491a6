"""The linear layer whose 4-bit weights are indices into a table, on the CPU; test_cuda_gemm.py has the GPU's."""

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
from support.quantized_gemm import random_weight
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
        ("scales", {"scales": torch.ones(1, 4, 16)}),
        ("x", {"x": torch.zeros(2, 64)}),
    ],
)
def test_errors_name_the_argument(argument: str, change: dict[str, Any], device: str) -> None:
    packed, _ = weight_of(16, 192)
    with pytest.raises(RuntimeError, match=rf"\b{argument}\b"):
        ops.lut_gemm(**({"x": torch.zeros(2, 192)} | packed | change))
