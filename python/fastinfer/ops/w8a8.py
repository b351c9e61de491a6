"""Linear layer with an int8 weight and int8 activations (W8A8)."""

import torch
from torch import Tensor

from fastinfer.ops._library import inference_only, into, ops


def w8a8_gemm(
    x: Tensor,
    x_scales: Tensor,
    qweight: Tensor,
    scales: Tensor,
    out_features: int,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
) -> Tensor:
    """Compute a W8A8 linear layer, ``x_scales[:, None] * scales * (x @ q.T)``, with an exact int32 product.

    The epilogue adds the bias, and then applies the activation or adds the residual. CPUs with AMX compute 16 tokens
    and more in int8 tiles, bit by bit with the result of fewer.

    Args:
        x: [tokens, in_features] int8, contiguous; from :func:`fastinfer.ops.quantize_int8` or ``rms_norm_quantize``. On
            the CPU it must not contain -128, which those never return; on CUDA it must be aligned to 16 bytes.
        x_scales: [tokens] fp32; the scales that belong to ``x``.
        qweight: packed weight from :func:`fastinfer.ops.int8_pack`, with at most 131,040 inputs.
        scales: packed scales from :func:`fastinfer.ops.pack_scales` of [out_features, 1]; fp16 or fp32.
        out_features: number of rows of the weight (the packed form is padded to a multiple of 16).
        bias: [out_features]; fp32 or ``dtype``.
        activation: gated activation ``"silu"``, ``"gelu_tanh"`` or ``"gelu"``, or ``None``; see
            :mod:`fastinfer.ops.gemm`.
        residual: [tokens, out_features] of ``dtype``; added to the result. Not together with ``activation``.
        dtype: dtype of the result: fp32, bf16 or fp16.
        out: receives the result; may be ``residual``; see :mod:`fastinfer.ops`.

    Returns:
        [tokens, out_features] (``out_features / 2`` with an activation). The epilogue is computed in fp32 and rounded
        once.

    Raises:
        RuntimeError: a shape, dtype, device or stride does not fit; ``scales`` has more than one group; ``activation``
            is unknown or is combined with a ``residual``.

    Devices: CPU, CUDA.

    Source: Dettmers et al., 2022, https://arxiv.org/abs/2208.07339, section 3.1.

    >>> import torch, fastinfer.ops as ops
    >>> x, q = torch.randn(3, 64), torch.randint(-127, 128, (32, 64), dtype=torch.int8)
    >>> x_int8, x_scales = ops.quantize_int8(x)
    >>> packed = ops.int8_pack(q), ops.pack_scales(torch.ones(32, 1))
    >>> out = ops.w8a8_gemm(x_int8, x_scales, *packed, out_features=32, dtype=torch.float32)
    >>> torch.allclose(out, (x_int8.int() @ q.int().T) * x_scales[:, None])
    True
    """
    inference_only("w8a8_gemm", "x_scales residual", x_scales, residual)
    if out is not None:
        return into(out, ops.w8a8_gemm, x, x_scales, qweight, scales, out_features, bias, activation, residual, dtype)
    return ops.w8a8_gemm.default(x, x_scales, qweight, scales, out_features, bias, activation, residual, dtype)
