"""Experts in MXFP4 are bitwise what arithmetic, number by number, makes of them."""

import pytest
import torch
from support.helpers import assert_bitwise
from support.mxfp4 import dequantize_mxfp4

from fastinfer.errors import CheckpointFormatError, UnsupportedModelError
from fastinfer.formats.linear_tensors import LinearTensors
from fastinfer.formats.mxfp4 import MXFP4Experts
from fastinfer.formats.quantized_checkpoint import read_linear


@pytest.mark.parametrize(
    ("exponents", "dtype"),
    [
        ((104, 144), torch.float16),
        ((103, 120), torch.float32),
        ((120, 145), torch.float32),
        ((0, 255), torch.float32),
    ],
)
def test_every_number(exponents: tuple[int, int], dtype: torch.dtype) -> None:
    """All bytes, and all exponents of a range, the first and last of which are there."""
    blocks = torch.arange(256).repeat(60).byte()[torch.randperm(256 * 60)].view(3, 5, 64, 16)
    scales = torch.randint(*exponents, (3, 5, 64)).byte()
    scales[0, 0, 0], scales[2, 4, 63] = exponents[0], exponents[1] - 1
    tensors = {"mlp.experts.up_blocks": blocks, "mlp.experts.up_scales": scales}
    experts = MXFP4Experts.read(LinearTensors(tensors, "mlp.experts"), "up")
    assert experts.scales.dtype == dtype
    for index in range(3):
        expected = dequantize_mxfp4(blocks[index], scales[index]) + 0.0  # no -0
        for rows in (slice(None), slice(1, 5, 2)):
            weight = experts.expert(index, rows)
            assert weight.scales.dtype == dtype
            assert_bitwise(weight.dequantize() + 0.0, expected[rows])


def test_nan_is_refused() -> None:
    scales = torch.full((1, 2, 3), 120).byte()
    scales[0, 1, 2] = 255
    tensors = {"e.up_blocks": torch.zeros(1, 2, 3, 16).byte(), "e.up_scales": scales}
    with pytest.raises(CheckpointFormatError, match=r"'e.up_scales': expected exponents below 255"):
        MXFP4Experts.read(LinearTensors(tensors, "e"), "up")


def test_layers_that_are_no_experts() -> None:
    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    weight = torch.randn(3, 5)
    assert_bitwise(read_linear({"o_proj.weight": weight}, "o_proj", config).dequantize(), weight)
    with pytest.raises((CheckpointFormatError, UnsupportedModelError), match="expected float32 or"):
        read_linear({"o_proj.weight": weight.byte()}, "o_proj", config)
