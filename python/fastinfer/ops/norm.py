"""LayerNorm, and RMSNorm with a residual added before or after it or with an int8 result."""

from torch import Tensor

from fastinfer.ops._library import inference_only, into, ops


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    residual: Tensor | None = None,
    factor: float = 1.0,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Compute RMSNorm over the last dimension, ``x / sqrt(mean(x**2) + eps) * weight``, with statistics in fp32.

    Args:
        x: [..., hidden]; fp32, bf16 or fp16; contiguous.
        weight: [hidden]; fp32 or the dtype of ``x``.
        eps: added to the mean of squares.
        residual: shape and dtype of ``x``; added to the norm in fp32, before the result is rounded. It is not changed.
        factor: factor of the result, residual included.
        out: receives the result; may be ``x`` or ``residual``; see :mod:`fastinfer.ops`.

    Returns:
        [..., hidden], dtype of ``x``.

    Raises:
        RuntimeError: a shape, dtype or device does not fit.

    Devices: CPU, CUDA.

    Source: Zhang and Sennrich, 2019, https://arxiv.org/abs/1910.07467.

    >>> import torch, fastinfer.ops as ops
    >>> ops.rms_norm(torch.tensor([[3.0, 4.0]]), torch.ones(2), eps=0.0)
    tensor([[0.8485, 1.1314]])
    """
    inference_only("rms_norm", "x residual", x, residual)
    if out is not None:
        return into(out, ops.rms_norm, x, weight, eps, residual, factor)
    return ops.rms_norm.default(x, weight, eps, residual, factor)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, *, out: Tensor | None = None
) -> Tensor:
    """Compute ``residual += x`` in place, then :func:`rms_norm` of the sum, in one pass over memory.

    The norm reads the sum as it is stored, rounded to the dtype of ``residual``, so the result equals that of two
    separate operations.

    Args:
        x: [..., hidden]; fp32, bf16 or fp16; contiguous.
        residual: shape and dtype of ``x``; changed in place.
        weight: [hidden]; fp32 or the dtype of ``x``.
        eps: added to the mean of squares.
        out: receives the result; may be ``x``; see :mod:`fastinfer.ops`.

    Returns:
        [..., hidden], dtype of ``x``.

    Raises:
        RuntimeError: a shape, dtype or device does not fit.

    Devices: CPU, CUDA.

    Source: Zhang and Sennrich, 2019, https://arxiv.org/abs/1910.07467.

    >>> import torch, fastinfer.ops as ops
    >>> x, residual = torch.tensor([[1.0, 2.0]]), torch.tensor([[2.0, 2.0]])
    >>> ops.add_rms_norm(x, residual, torch.ones(2), eps=0.0)
    tensor([[0.8485, 1.1314]])
    >>> residual
    tensor([[3., 4.]])
    """
    inference_only("add_rms_norm", "x residual", x, residual)
    if out is not None:
        return into(out, ops.add_rms_norm, x, residual, weight, eps)
    return ops.add_rms_norm.default(x, residual, weight, eps)


def rms_norm_quantize(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Quantise :func:`rms_norm`, or :func:`add_rms_norm` if there is a residual, to int8 with one scale per row.

    The fp32 norm is quantised directly, without rounding it to the dtype of ``x``; otherwise the quantisation is that
    of :func:`fastinfer.ops.quantize_int8`.

    Args:
        x: [..., hidden]; fp32, bf16 or fp16; contiguous.
        residual: shape and dtype of ``x``, changed in place to ``residual + x``; or ``None``.
        weight: [hidden]; fp32 or the dtype of ``x``.
        eps: added to the mean of squares.

    Returns:
        The norm, [..., hidden] int8, and the scales of its rows, [...] fp32.

    Raises:
        RuntimeError: a shape, dtype or device does not fit.

    Devices: CPU, CUDA.

    Source: Zhang and Sennrich, 2019, https://arxiv.org/abs/1910.07467; Dettmers et al., 2022,
    https://arxiv.org/abs/2208.07339, section 3.1.

    >>> import torch, fastinfer.ops as ops
    >>> q, scale = ops.rms_norm_quantize(torch.tensor([[3.0, 4.0]]), None, torch.ones(2), eps=0.0)
    >>> q
    tensor([[ 95, 127]], dtype=torch.int8)
    >>> q * scale[:, None]  # rms_norm of the same is [[0.8485, 1.1314]]
    tensor([[0.8463, 1.1314]])
    """
    inference_only("rms_norm_quantize", "x residual", x, residual)
    return ops.rms_norm_quantize.default(x, residual, weight, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5, *, out: Tensor | None = None) -> Tensor:
    """Compute LayerNorm over the last dimension, ``(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias``.

    Statistics are computed in fp32: first the mean, then the (biased) variance of the differences to it.

    Args:
        x: [..., hidden]; fp32, bf16 or fp16; contiguous.
        weight: [hidden]; fp32 or the dtype of ``x``.
        bias: [hidden], dtype of ``weight``.
        eps: added to the variance.
        out: receives the result; may be ``x``; see :mod:`fastinfer.ops`.

    Returns:
        [..., hidden], dtype of ``x``.

    Raises:
        RuntimeError: a shape, dtype or device does not fit.

    Devices: CPU, CUDA.

    Source: Ba et al., 2016, https://arxiv.org/abs/1607.06450.

    >>> import torch, fastinfer.ops as ops
    >>> ops.layer_norm(torch.tensor([[1.0, 3.0]]), torch.ones(2), torch.zeros(2), eps=0.0)
    tensor([[-1.,  1.]])
    """
    inference_only("layer_norm", "x", x)
    if out is not None:
        return into(out, ops.layer_norm, x, weight, bias, eps)
    return ops.layer_norm.default(x, weight, bias, eps)
