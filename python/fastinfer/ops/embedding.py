"""Token embedding from a dense table; for quantised tables use int4_dequantize and int8_dequantize."""

import torch
from torch import Tensor

from fastinfer.ops._library import inference_only, into, ops


def embedding(
    weight: Tensor,
    ids: Tensor,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Look up rows of a table: ``weight[ids]``, or ``residual + weight[ids]`` to add learned positions.

    Args:
        weight: [vocab, hidden]; fp32, bf16 or fp16; contiguous.
        ids: [tokens] int64; contiguous. An id outside 0 .. vocab - 1 raises on the CPU; on CUDA its row is zeros.
        residual: [tokens, hidden]; fp32, bf16 or fp16; contiguous; not changed. The sum is computed in fp32.
        dtype: dtype of the result; ``None`` for the dtype of ``weight``. With a residual it must be ``None``: the
            result has the dtype of ``residual``.
        out: receives the result; may be ``residual``; see :mod:`fastinfer.ops`.

    Returns:
        [tokens, hidden].

    Raises:
        RuntimeError: a shape, dtype or device does not fit; both ``dtype`` and ``residual`` are passed; on the CPU also
            an id outside the table.

    Devices: CPU, CUDA.

    Source: the same look-up as ``torch.nn.functional.embedding``.

    >>> import torch, fastinfer.ops as ops
    >>> ops.embedding(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([1, 1]))
    tensor([[3., 4.],
            [3., 4.]])
    """
    if residual is not None:
        inference_only("embedding", "residual", residual)
    if out is not None:
        return into(out, ops.embedding, weight, ids, residual, dtype)
    return ops.embedding.default(weight, ids, residual, dtype)
