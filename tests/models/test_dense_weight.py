"""Weights that are not quantised."""

import torch
from support.helpers import assert_bitwise

from fastinfer import ops
from fastinfer.weights.weight import DenseWeight


def test_a_norm_before_bf16_products_rounds_to_bf16() -> None:
    """A fused one does not, and its products take twice the time on CPUs with AVX-512 BF16."""
    x, weight, norm_weight = torch.randn(5, 96).bfloat16(), torch.randn(48, 96).bfloat16(), torch.rand(96) + 0.5
    out = DenseWeight(weight).linear(x, norm_weight=norm_weight, eps=1e-5)
    assert_bitwise(out, ops.gemm(ops.rms_norm(x, norm_weight, 1e-5), weight))


def test_a_norm_before_other_products_is_fused() -> None:
    x, weight, norm_weight = torch.randn(5, 96), torch.randn(48, 96).bfloat16(), torch.rand(96) + 0.5
    out = DenseWeight(weight).linear(x, norm_weight=norm_weight, eps=1e-5)
    assert_bitwise(out, ops.gemm(x, weight, norm_weight=norm_weight, eps=1e-5))
