"""Quantisation of activations to integers, with one scale per row."""

from torch import Tensor

from fastinfer.ops._library import inference_only, ops


def quantize_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise rows to int8: ``q = round(x / scale)``, half to even, with ``scale = max |x| / 127``.

    The kernel multiplies by the fp32 reciprocal 127 / max |x|, so a quotient within 1e-7 of a tie may be rounded to
    either neighbour. A row of zeros, or of magnitudes below 4e-37, becomes zeros with scale 0. A row with an infinity
    or a NaN becomes zeros with scale NaN, so that the product shows it.

    Args:
        x: [..., hidden]; fp32, bf16 or fp16; contiguous.

    Returns:
        The integers, [..., hidden] int8, and the scales of the rows, [...] fp32.

    Raises:
        RuntimeError: a dtype or stride does not fit.

    Devices: CPU, CUDA.

    Source: Dettmers et al., 2022, https://arxiv.org/abs/2208.07339, section 3.1.

    >>> import torch, fastinfer.ops as ops
    >>> ops.quantize_int8(torch.tensor([[127.0, -3.6, 2.5]]))
    (tensor([[127,  -4,   2]], dtype=torch.int8), tensor([1.]))
    """
    inference_only("quantize_int8", "x", x)
    return ops.quantize_int8.default(x)
