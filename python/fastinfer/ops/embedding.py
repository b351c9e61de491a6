"""Token embedding over a dense table; quantised tables have int4_dequantize and int8_dequantize."""

from torch import Tensor

from fastinfer.ops._library import ops


def embedding(weight: Tensor, ids: Tensor) -> Tensor:
    """``weight[ids]``.

    Args:
        weight: [vocab, hidden]; fp32, bf16 or fp16; contiguous.
        ids: [tokens] int64; contiguous. An id outside 0 .. vocab - 1 raises on the CPU; on CUDA it gives zeros.

    Returns:
        [tokens, hidden], dtype of ``weight``.

    Devices: CPU, CUDA (not yet run on a GPU).

    >>> import torch, fastinfer.ops as ops
    >>> ops.embedding(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([1, 1]))
    tensor([[3., 4.],
            [3., 4.]])
    """
    return ops.embedding.default(weight, ids)
