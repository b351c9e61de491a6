"""Weights in MXFP8: fp8 (e4m3), with an exponent of a power of two (e8m0) for each group of 32 inputs.

As all weights in fp8, they become int8 or dense fp32, see :mod:`fastinfer.formats.fp8`.
https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf.
"""

from torch import Tensor

from fastinfer.formats.fp8 import E4M3, unpack_fp8
from fastinfer.formats.linear_tensors import LinearTensors
from fastinfer.formats.mxfp4 import MX_GROUP, SCALES, read_exponents
from fastinfer.formats.unpacked import Dense, Int8


def read_mxfp8(layer: LinearTensors, exact: bool) -> Int8 | Dense:
    """Read ``weight`` [out, in] e4m3 and ``weight_scale``, its exponents plus 127, [out, in / 32] uint8.

    Args:
        layer: tensors of the layer.
        exact: whether to keep all numbers unrounded, in fp32.

    Raises:
        CheckpointFormatError: a tensor is missing, does not have the shape and type of the format, or has numbers that
            are not finite.
        UnsupportedModelError: the kernels do not support the number of inputs.
    """
    return unpack_mxfp8(layer, layer.take("weight", E4M3, (None, None)), "weight_scale", exact)


def unpack_mxfp8(layer: LinearTensors, weight: Tensor, scale_name: str, exact: bool) -> Int8 | Dense:
    """Unpack a weight [out, in] e4m3 whose exponents have this name; all else is as for :func:`read_mxfp8`."""
    rows, columns = weight.shape
    layer.group_size(MX_GROUP, columns)
    exponents = read_exponents(layer, scale_name, (rows, columns // MX_GROUP))
    scales = 2 * SCALES[exponents.int()]
    return unpack_fp8(layer, weight, scales, (1, MX_GROUP), exact)
