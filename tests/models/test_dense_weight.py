"""Weights that are not quantised."""

import numpy as np
import pytest
import torch
from support.helpers import assert_bitwise

from fastinfer import ops
from fastinfer.formats.unpacked import Dense
from fastinfer.weights.pack import make_weight
from fastinfer.weights.weight import ConcatenatedWeight, DenseWeight


def test_a_norm_before_bf16_products_rounds_to_bf16() -> None:
    """A fused one does not, and its products take twice the time on CPUs with AVX-512 BF16."""
    x, weight, norm_weight = torch.randn(5, 96).bfloat16(), torch.randn(48, 96).bfloat16(), torch.rand(96) + 0.5
    out = DenseWeight(weight).linear(x, norm_weight=norm_weight, eps=1e-5)
    assert_bitwise(out, ops.gemm(ops.rms_norm(x, norm_weight, 1e-5), weight))


def test_a_norm_before_other_products_is_fused() -> None:
    x, weight, norm_weight = torch.randn(5, 96), torch.randn(48, 96).bfloat16(), torch.rand(96) + 0.5
    out = DenseWeight(weight).linear(x, norm_weight=norm_weight, eps=1e-5)
    assert_bitwise(out, ops.gemm(x, weight, norm_weight=norm_weight, eps=1e-5))


def test_memory_that_torch_has_not_allocated_is_copied() -> None:
    """It may be a file's, which could be cut while the weight is in use."""
    foreign, own = torch.from_numpy(np.ones((16, 32), np.float32)), torch.ones(16, 32)
    copied, kept = make_weight(Dense(foreign), 32), make_weight(Dense(own), 32)
    assert isinstance(copied, DenseWeight)
    assert isinstance(kept, DenseWeight)
    assert copied.values.data_ptr() != foreign.data_ptr()
    assert kept.values.data_ptr() == own.data_ptr()


def test_a_concatenated_weight_fuses_nothing_behind_it() -> None:
    weight = ConcatenatedWeight((DenseWeight(torch.ones(16, 32)), DenseWeight(torch.ones(16, 32))))
    with pytest.raises(ValueError, match="supports neither activation nor residual, got activation and residual"):
        weight.linear(torch.ones(1, 32), activation="silu", residual=torch.ones(1, 32))
