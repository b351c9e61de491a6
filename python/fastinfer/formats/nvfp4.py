"""Weights in NVFP4: fp4 (e2m1), with a scale in e4m3 for each group of 16 inputs and a factor for the whole weight.

Two numbers are in a byte, the first in its lower half. The kernels' groups have at least 32 inputs, so two groups get
one scale, and the weight becomes int8: the joined scale is the larger of the two divided by 20. The numbers of that
group, multiples of half its scale up to 6, stay exact; those of the other group are rounded to multiples of the joined
scale. For normally distributed weights this adds 0.04 of the format's own error (root mean square). Where all numbers
must stay unrounded, the weight is dense fp32. Inputs are not rounded to fp4.
https://arxiv.org/abs/2509.25149, section 2.

A GGUF file has blocks of 64 numbers: four scales, then the numbers of each group, the first eight in the lower halves
of its bytes. The factor is a tensor of its own.
"""

import numpy as np
import torch
from torch import Tensor

from fastinfer.formats.fp8 import E4M3, row_parts
from fastinfer.formats.linear_tensors import KERNEL_GROUP, LinearTensors
from fastinfer.formats.unpacked import Dense, Int8
from fastinfer.formats.zero_points import kernel_scales

NVFP4_GROUP = 16
# Twice the numbers of e2m1, which are integers; the fourth bit is the sign.
HALVES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.int8)
# Scales of GGUF files, which have no sign. NaN stands for 0.
UNSIGNED_E4M3 = np.where(
    np.arange(256) == 0x7F,
    np.float32(0),
    np.ldexp(
        (np.arange(256) % 8 + 8 * (np.arange(256) // 8 % 16 > 0)).astype(np.float32),
        np.maximum(np.arange(256) // 8 % 16, 1) - 10,
    ),
)
# The two numbers of each byte.
PAIRS = np.stack([np.tile(HALVES, 16), np.repeat(HALVES, 16)], axis=1)
# 12 halves become 120 of int8's 127 levels.
LEVELS = 10


def read_nvfp4(layer: LinearTensors, weight_name: str, factor: Tensor, exact: bool) -> Int8 | Dense:
    """Read a weight and its scales, ``weight_scale`` [out, in / 16] e4m3: Int8, or Dense if ``exact``.

    Args:
        layer: tensors of the layer.
        weight_name: name of the tensor [out, in / 2] uint8.
        factor: number by which the scales are multiplied.
        exact: whether to keep all numbers unrounded, in fp32.

    Raises:
        CheckpointFormatError: a tensor is missing, does not have the shape and type of the format, or has numbers that
            are not finite.
        UnsupportedModelError: the kernels do not support the number of inputs.
    """
    packed = layer.take(weight_name, torch.uint8, (None, None))
    rows, columns = packed.shape[0], 2 * packed.shape[1]
    layer.group_size(KERNEL_GROUP, columns)
    scales = layer.take("weight_scale", E4M3, (rows, columns // NVFP4_GROUP)).float() * factor
    if not scales.isfinite().all():
        layer.fail("weight_scale", "expected finite numbers, also after they are multiplied by the weight's factor")
    return unpack_nvfp4(packed, scales, exact)


def unpack_nvfp4(packed: Tensor, scales: Tensor, exact: bool) -> Int8 | Dense:
    """Unpack [rows, cols / 2] uint8 with scales [rows, cols / 16] fp32, which are finite; see :func:`read_nvfp4`."""
    rows, columns = packed.shape[0], 2 * packed.shape[1]
    if exact:
        return Dense(_multiply(packed, scales / 2))
    pairs = scales.unflatten(1, (-1, 2))
    largest = pairs.abs().amax(-1, keepdim=True)
    # Groups of which both scales are 0 have zeros only.
    factors = (pairs / largest).nan_to_num_(0.0).flatten(1) * LEVELS
    q = torch.empty(rows, columns, dtype=torch.int8)
    for part in row_parts(rows, columns):
        q[part] = _multiply(packed[part], factors[part]).round_().to(torch.int8)
    joined, _ = kernel_scales(largest[..., 0] / (2 * LEVELS), exact=False)
    return Int8(q, joined)


def unpack_nvfp4_blocks(data: np.ndarray, factor: Tensor, exact: bool) -> Int8 | Dense:
    """Unpack rows of a GGUF file, as :func:`read_nvfp4` reads those of a layer.

    Args:
        data: [rows, row_bytes] uint8.
        factor, exact: see there.
    """
    blocks = np.ascontiguousarray(data).reshape(len(data), -1, 36)
    groups = blocks[..., 4:].reshape(len(data), -1, 8)
    numbers = np.concatenate([groups & 15, groups >> 4], axis=-1)
    packed = (numbers[..., 0::2] | numbers[..., 1::2] << 4).reshape(len(data), -1)
    scales = torch.from_numpy(UNSIGNED_E4M3[blocks[..., :4]].reshape(len(data), -1)) * factor
    return unpack_nvfp4(torch.from_numpy(packed), scales, exact)


def _multiply(packed: Tensor, factors: Tensor) -> Tensor:
    """Unpack [rows, cols / 2] bytes and multiply each group by its factor; ``factors`` is [rows, cols / 16]."""
    halves = torch.from_numpy(PAIRS.view(np.int16).reshape(-1)[packed.numpy()]).view(torch.int8)
    groups: Tensor = halves.unflatten(1, (-1, NVFP4_GROUP))
    return (groups * factors[..., None]).flatten(1)
