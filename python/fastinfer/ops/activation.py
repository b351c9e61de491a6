"""Gated activations, plain GELU, squared ReLU, xIELU, gates by sigmoid and softplus, and soft-capping of logits."""

from torch import Tensor

from fastinfer.ops._library import inference_only, into, ops


def silu_and_mul(x: Tensor, limit: float | None = None, *, out: Tensor | None = None) -> Tensor:
    """Compute the elementwise half of SwiGLU: ``silu(x[..., :d]) * x[..., d:]``.

    Args:
        x: [..., 2 * d]; fp32, bf16 or fp16; contiguous. The gate comes first.
        limit: largest value of the activated gate, and of either sign of the other factor (Step 3.5); positive.
            ``None`` for no limits.
        out: receives the result; see :mod:`fastinfer.ops`.

    Returns:
        [..., d], dtype of ``x``; computed in fp32.

    Raises:
        RuntimeError: the last dimension is odd, ``limit`` is not positive and finite in fp32, or a dtype or stride does
            not fit.

    Devices: CPU, CUDA.

    Source: SwiGLU: Shazeer, 2020, https://arxiv.org/abs/2002.05202; with limits as in Step3p7MLP of transformers.

    >>> import torch, fastinfer.ops as ops
    >>> ops.silu_and_mul(torch.tensor([[1.0, 2.0]]))
    tensor([[1.4621]])
    >>> ops.silu_and_mul(torch.tensor([[100.0, -100.0]]), 7.0)
    tensor([[-49.]])
    """
    inference_only("silu_and_mul", "x", x)
    if out is not None:
        return into(out, ops.silu_and_mul, x, limit)
    return ops.silu_and_mul.default(x, limit)


def gelu_and_mul(x: Tensor, approximate: str = "tanh", *, out: Tensor | None = None) -> Tensor:
    """Compute the elementwise half of GeGLU: ``gelu(x[..., :d]) * x[..., d:]``.

    Args:
        x: [..., 2 * d]; fp32, bf16 or fp16; contiguous. The gate comes first.
        approximate: ``"tanh"`` or ``"none"`` (exact, by erf), as in ``torch.nn.functional.gelu``.
        out: receives the result; see :mod:`fastinfer.ops`.

    Returns:
        [..., d], dtype of ``x``; computed in fp32.

    Raises:
        RuntimeError: ``approximate`` is unknown, the last dimension is odd, or a dtype or stride does not fit.

    Devices: CPU, CUDA.

    Source: GEGLU: Shazeer, 2020, https://arxiv.org/abs/2002.05202.

    >>> import torch, fastinfer.ops as ops
    >>> x = torch.randn(3, 8)
    >>> expected = torch.nn.functional.gelu(x[:, :4], approximate="tanh") * x[:, 4:]
    >>> torch.allclose(ops.gelu_and_mul(x), expected, atol=1e-5)
    True
    """
    inference_only("gelu_and_mul", "x", x)
    if out is not None:
        return into(out, ops.gelu_and_mul, x, approximate)
    return ops.gelu_and_mul.default(x, approximate)


def clamped_swiglu(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Compute GPT-OSS's elementwise half of SwiGLU: ``g * sigmoid(1.702 * g) * (u + 1)``.

    The gate ``g`` is ``x[..., :d]``, but at most 7, and ``u`` is ``x[..., d:]`` limited to -7 .. 7.

    Args:
        x: [..., 2 * d]; fp32, bf16 or fp16; contiguous. The gate comes first.
        out: receives the result; see :mod:`fastinfer.ops`.

    Returns:
        [..., d], dtype of ``x``; computed in fp32.

    Raises:
        RuntimeError: the last dimension is odd, or a dtype or stride does not fit.

    Devices: CPU, CUDA.

    Source: gpt-oss model card, OpenAI, 2025, https://arxiv.org/abs/2508.10925, section 2.2.

    >>> import torch, fastinfer.ops as ops
    >>> ops.clamped_swiglu(torch.tensor([[1.0, 2.0], [100.0, -100.0]]))
    tensor([[  2.5374],
            [-41.9997]])
    """
    inference_only("clamped_swiglu", "x", x)
    if out is not None:
        return into(out, ops.clamped_swiglu, x)
    return ops.clamped_swiglu.default(x)


def gelu(x: Tensor, approximate: str = "tanh", factor: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """Compute GELU, elementwise, or its product with a factor.

    Args:
        x: [..., d]; fp32, bf16 or fp16; contiguous.
        approximate: ``"tanh"`` or ``"none"`` (exact, by erf), as in ``torch.nn.functional.gelu``.
        factor: [tokens, d], dtype of ``x``, which is then [tokens, d], too; rows may be strided.
        out: receives the result; may be ``x``; see :mod:`fastinfer.ops`.

    Returns:
        Shape and dtype of ``x``; computed in fp32.

    Raises:
        RuntimeError: ``approximate`` is unknown, or a shape, dtype or stride does not fit.

    Devices: CPU, CUDA.

    Source: Hendrycks and Gimpel, 2016, https://arxiv.org/abs/1606.08415.

    >>> import torch, fastinfer.ops as ops
    >>> x = torch.randn(3, 8)
    >>> torch.allclose(ops.gelu(x, "none"), torch.nn.functional.gelu(x), atol=1e-5)
    True
    """
    inference_only("gelu", "x factor", x, factor)
    if out is not None:
        return into(out, ops.gelu, x, approximate, factor)
    return ops.gelu.default(x, approximate, factor)


def relu2(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Compute the squared ReLU, elementwise: ``max(x, 0) ** 2``.

    Args:
        x: [..., d]; fp32, bf16 or fp16; contiguous.
        out: receives the result; may be ``x``; see :mod:`fastinfer.ops`.

    Returns:
        Shape and dtype of ``x``; computed in fp32.

    Raises:
        RuntimeError: a dtype or stride does not fit.

    Devices: CPU, CUDA.

    Source: Primer, So et al., 2021, https://arxiv.org/abs/2109.08668.

    >>> import torch, fastinfer.ops as ops
    >>> ops.relu2(torch.tensor([-1.0, 3.0]))
    tensor([0., 9.])
    """
    inference_only("relu2", "x", x)
    if out is not None:
        return into(out, ops.relu2, x)
    return ops.relu2.default(x)


def xielu(
    x: Tensor, positive: float, negative: float, beta: float = 0.5, eps: float = -1e-6, *, out: Tensor | None = None
) -> Tensor:
    """Compute xIELU, elementwise, an activation whose two sides have learned factors.

    It is ``positive * x ** 2 + beta * x`` for x > 0, and ``negative * (expm1(min(x, eps)) - x) + beta * x`` elsewhere.

    Args:
        x: [..., d]; fp32, bf16 or fp16; contiguous.
        positive: factor of the square, in models ``softplus(alpha_p)`` of a learned ``alpha_p``.
        negative: factor of the other side, in models ``beta + softplus(alpha_n)``.
        beta: slope at 0.
        eps: largest argument of expm1, from -1 to 0.
        out: receives the result; may be ``x``; see :mod:`fastinfer.ops`.

    Returns:
        Shape and dtype of ``x``; computed in fp32.

    Raises:
        RuntimeError: a dtype or stride does not fit, a factor is not finite in fp32, or ``eps`` is out of range.

    Devices: CPU, CUDA.

    Source: Huang and Schlag, 2024, https://arxiv.org/abs/2411.13010; with ``eps`` as in Apertus.

    >>> import torch, fastinfer.ops as ops
    >>> ops.xielu(torch.tensor([-1.0, 2.0]), 0.5, 2.0)
    tensor([0.2358, 3.0000])
    """
    inference_only("xielu", "x", x)
    if out is not None:
        return into(out, ops.xielu, x, positive, negative, beta, eps)
    return ops.xielu.default(x, positive, negative, beta, eps)


def sigmoid_gate(x: Tensor, gate: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Multiply by the sigmoid of a gate, of each element or of a group of them: ``x * sigmoid(gate)``.

    Args:
        x: [tokens, n]; fp32, bf16 or fp16; contiguous.
        gate: [tokens, n], dtype of ``x``; rows may be strided (a slice of a fused projection). With [tokens, groups],
            where ``groups`` divides n, each gate is for n / groups neighbouring elements (a head of attention).
        out: receives the result; may be ``x``; see :mod:`fastinfer.ops`.

    Returns:
        [tokens, n], dtype of ``x``; computed in fp32.

    Raises:
        RuntimeError: a shape, dtype, device or stride does not fit.

    Devices: CPU, CUDA.

    Source: gated attention: Qiu et al., 2025, https://arxiv.org/abs/2505.06708.

    >>> import torch, fastinfer.ops as ops
    >>> ops.sigmoid_gate(torch.tensor([[2.0, 3.0]]), torch.tensor([[0.0, 100.0]]))
    tensor([[1., 3.]])
    >>> ops.sigmoid_gate(torch.tensor([[2.0, 3.0]]), torch.tensor([[0.0]]))
    tensor([[1.0000, 1.5000]])
    """
    inference_only("sigmoid_gate", "x gate", x, gate)
    if out is not None:
        return into(out, ops.sigmoid_gate, x, gate)
    return ops.sigmoid_gate.default(x, gate)


def softplus_gate(x: Tensor, gate: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Multiply by the softplus of a gate, of each element or of a group of them: ``x * log(1 + exp(gate))``.

    Args:
        x, gate, out: as in :func:`sigmoid_gate`.

    Returns:
        [tokens, n], dtype of ``x``; computed in fp32.

    Raises:
        RuntimeError: a shape, dtype, device or stride does not fit.

    Devices: CPU, CUDA.

    Source: gates of attention's output in LagunaAttention of transformers.

    >>> import torch, fastinfer.ops as ops
    >>> ops.softplus_gate(torch.tensor([[2.0, 3.0]]), torch.tensor([[0.0, 100.0]]))
    tensor([[  1.3863, 300.0000]])
    """
    inference_only("softplus_gate", "x gate", x, gate)
    if out is not None:
        return into(out, ops.softplus_gate, x, gate)
    return ops.softplus_gate.default(x, gate)


def softcap(x: Tensor, cap: float) -> None:
    """Limit logits smoothly to -cap .. cap, in place: ``x = cap * tanh(x / cap)``.

    The result is computed in fp32, with an error of at most ``2e-7 * cap``.

    Args:
        x: any shape; fp32, bf16 or fp16; contiguous; changed in place.
        cap: the limit, positive and finite.

    Raises:
        RuntimeError: ``cap`` is not positive and finite in fp32, or a dtype or stride does not fit.

    Devices: CPU, CUDA.

    Source: Gemma 2, 2024, https://arxiv.org/abs/2408.00118, section 2.

    >>> import torch, fastinfer.ops as ops
    >>> logits = torch.tensor([[1.0, 60.0]])
    >>> ops.softcap(logits, 30.0)
    >>> logits
    tensor([[ 0.9996, 28.9208]])
    """
    inference_only("softcap", "x", x)
    ops.softcap.default(x, cap)
