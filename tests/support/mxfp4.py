"""Reference for MXFP4, number by number."""

import math

import torch
from torch import Tensor

MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
NUMBERS = [sign * magnitude for sign in (1, -1) for magnitude in MAGNITUDES]


def dequantize_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """From blocks [..., groups, 16] and biased exponents [..., groups] to [..., 32 * groups] fp32."""
    rows = [
        [math.ldexp(NUMBERS[half], exponent - 127) for byte in group for half in (byte % 16, byte // 16)]
        for group, exponent in zip(blocks.reshape(-1, 16).tolist(), scales.flatten().tolist(), strict=True)
    ]
    return torch.tensor(rows, dtype=torch.float64).float().view(*blocks.shape[:-2], -1)
