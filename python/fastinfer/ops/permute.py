"""Reordering of activation columns, for weights that were quantised in another order of inputs."""

from torch import Tensor

from fastinfer.ops._library import inference_only, into, ops


def permute_columns(x: Tensor, permutation: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Reorder the columns of activations: ``x[:, permutation]``.

    Args:
        x: [tokens, cols]; fp32, bf16 or fp16; rows may be strided, columns may not.
        permutation: [cols] int64; contiguous. An index outside 0 .. cols - 1 raises on the CPU; on CUDA it gives zeros.
        out: receives the result; see :mod:`fastinfer.ops`.

    Returns:
        [tokens, cols], dtype of ``x``.

    Raises:
        RuntimeError: a shape, dtype, device or stride does not fit; on the CPU also an index outside the columns.

    Devices: CPU, CUDA.

    Source: GPTQ's activation order, ``--act-order`` of https://github.com/IST-DASLab/gptq.

    >>> import torch, fastinfer.ops as ops
    >>> ops.permute_columns(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([2, 0, 1]))
    tensor([[3., 1., 2.]])
    """
    inference_only("permute_columns", "x", x)
    if out is not None:
        return into(out, ops.permute_columns, x, permutation)
    return ops.permute_columns.default(x, permutation)
