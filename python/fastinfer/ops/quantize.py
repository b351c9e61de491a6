"""Activations as integers, with one scale per row."""

from torch import Tensor

from fastinfer.ops._library import inference_only, ops


def quantize_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows as int8: ``q = round(x / scale)``, half to even, with ``scale = max |x| / 127``.

    Rounded is x times the fp32 reciprocal 127 / max |x|, so that a quotient within 1e-7 of a tie may go to either
    neighbour. A row of zeros, or one whose largest is below 4e-37, becomes zeros with scale 0; a row with an infinity
    or a NaN becomes zeros with scale NaN, so that it shows in the product.

    Args:
        x: [..., hidden]; fp32, bf16 or fp16; contiguous.

    Returns:
        [..., hidden] int8, and the rows' scales [...] fp32.

    Raises:
        RuntimeError: a dtype or strides that do not fit.

    Devices: CPU, CUDA (not yet run on a GPU).

    Source: Dettmers et al., 2022, https://arxiv.org/abs/2208.07339, section 3.1.

    >>> import torch, fastinfer.ops as ops
    >>> ops.quantize_int8(torch.tensor([[127.0, -3.6, 2.5]]))
    (tensor([[127,  -4,   2]], dtype=torch.int8), tensor([1.]))
    """
    inference_only("quantize_int8", "x", x)
    return ops.quantize_int8.default(x)
