"""Linear layers with fused neighbours: RMSNorm before; bias, gated activation or residual after.

All operators here compute ``epilogue(prologue(x) @ weight.T)``:

- prologue: ``rms_norm(x, norm_weight, eps)`` if ``norm_weight`` is passed;
- epilogue: ``+ bias``, then either a gated activation or ``+ residual``.

A gated activation (``"silu"``, ``"gelu_tanh"``, ``"gelu"``, ``"clamped_swiglu"``) expects gate and up rows interleaved
in runs of 16: rows 0-15 of the gate, rows 0-15 of up, rows 16-31 of the gate, ...
(:func:`fastinfer.ops.interleave_gate_up`), so that one tile of the output holds both. The output is then half as wide.
The first three multiply the activated gate by up; for the last see :func:`fastinfer.ops.clamped_swiglu`.

On a GPU ``x`` is bf16 or fp16, and products are summed in fp32:

- Up to 64 tokens, 4-bit and 8-bit weights are multiplied exactly, as integers, and their fp32 scales multiply the sums;
  only the result is rounded to 16 bits.
- With more tokens, the scale and then the scaled weight are rounded to 16 bits first, as a dequantised weight would be.
- A fused norm rounds ``x * norm_weight`` to 16 bits.
- The number of tokens determines the token tile (8, 16, 32, 64 or 128) and the split of long sums, and so the order of
  the sums and the last bit of the result. Under :func:`fastinfer.ops.batch_invariant` the tile always has 32 tokens,
  weights are exact, and the norm is computed before the product.
"""

from torch import Tensor

from fastinfer.ops._library import inference_only, into, ops


def gemm(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    activation: str | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Compute a linear layer with a dense weight.

    Args:
        x: [tokens, in_features]; fp32 (CPU), bf16 or fp16; rows may be strided.
        weight: [out_features, in_features]; fp32, bf16 or fp16; contiguous. On a GPU it has the dtype of ``x``, and
            in_features is a multiple of 8.
        bias: [out_features]; fp32 or the dtype of ``x``.
        norm_weight: [in_features]; fp32 or the dtype of ``x``; weight of the fused ``rms_norm`` of ``x``.
        eps: ``eps`` of the fused norm.
        activation: name of a gated activation, or ``None``; see :mod:`fastinfer.ops.gemm`.
        residual: [tokens, out_features], dtype of ``x``; added to the result. Not together with ``activation``.
        out: receives the result; may be ``residual``; see :mod:`fastinfer.ops`.

    Returns:
        [tokens, out_features] (``out_features / 2`` with an activation), dtype of ``x``. Accumulated in fp32.

    Raises:
        RuntimeError: a shape, dtype, device or stride does not fit; ``activation`` is unknown, is combined with a
            ``residual``, or the weight's rows are not a multiple of 32 for it.

    Devices: CPU, CUDA.

    Source: register blocking: Goto and van de Geijn, 2008, https://doi.org/10.1145/1356052.1356053; division of the
    work on a GPU: Stream-K, Osama et al., 2023, https://arxiv.org/abs/2301.03598.

    >>> import torch, fastinfer.ops as ops
    >>> x, weight, residual = torch.randn(3, 64), torch.randn(96, 64), torch.randn(3, 96)
    >>> expected = torch.nn.functional.rms_norm(x, (64,), eps=1e-6) @ weight.T + residual
    >>> torch.allclose(ops.gemm(x, weight, norm_weight=torch.ones(64), residual=residual), expected, atol=1e-3)
    True
    """
    inference_only("gemm", "x residual", x, residual)
    if out is not None:
        return into(out, ops.gemm, x, weight, bias, norm_weight, eps, activation, residual)
    return ops.gemm.default(x, weight, bias, norm_weight, eps, activation, residual)


def int8_gemm(
    x: Tensor,
    qweight: Tensor,
    scales: Tensor,
    mins: Tensor | None,
    out_features: int,
    *,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    activation: str | None = None,
    residual: Tensor | None = None,
    activation_bits: int = 32,
    out: Tensor | None = None,
) -> Tensor:
    """Compute a linear layer with an 8-bit weight ``w = scale * q + min``, q in -128..127.

    Args:
        x: [tokens, in_features]; fp32 (CPU), bf16 or fp16; rows may be strided.
        qweight: packed weight from :func:`int8_pack`, packed on the device of ``x`` (a GPU has its own layout).
        scales: packed scales from :func:`pack_scales`; fp16 or fp32; one per row and group of 32, 64, ... inputs.
        mins: packed minimums, like ``scales``; ``None`` for a symmetric weight.
        out_features: number of rows of the weight (the packed form is padded to a multiple of 16).
        bias, norm_weight, eps, activation, residual: as in :func:`gemm`.
        activation_bits: precision of ``x`` (after the norm) within the product; on a GPU only 32. 32: ``x`` is fp32,
            and the weight is dequantised on the fly. 8: integer products, the fastest, with a relative error of about
            0.4 %; each run of 16 inputs has its own scale, the smallest that fits among 4,095 multiples of a step that
            the row shares. 16: the same with 14 bits and runs of 32 inputs, as exact as fp32 for most purposes, at up
            to twice the arithmetic.
        out: receives the result; may be ``residual``; see :mod:`fastinfer.ops`.

    Returns:
        [tokens, out_features] (``out_features / 2`` with an activation), dtype of ``x``. Accumulated in fp32.

    Raises:
        RuntimeError: a shape, dtype, device or stride does not fit; ``activation_bits`` is unknown; ``activation`` is
            unknown, is combined with a ``residual``, or the weight's rows are not a multiple of 32 for it.

    Devices: CPU, CUDA.

    Source: integer products with scales on both sides: Dettmers et al., 2022, https://arxiv.org/abs/2208.07339, section
    2; see :func:`gemm` for the blocking.

    >>> import torch, fastinfer.ops as ops
    >>> q, scales = torch.randint(-128, 128, (32, 64), dtype=torch.int8), torch.rand(32, 2)  # groups of 32 inputs
    >>> packed = ops.int8_pack(q), ops.pack_scales(scales)
    >>> x, weight = torch.randn(3, 64), q * scales.repeat_interleave(32, dim=1)
    >>> exact = ops.int8_gemm(x, *packed, None, out_features=32)
    >>> torch.allclose(exact, x @ weight.T, rtol=1e-4, atol=1e-2)
    True
    >>> quick = ops.int8_gemm(x, *packed, None, out_features=32, activation_bits=8)
    >>> float((quick - exact).norm() / exact.norm()) < 0.01
    True
    """
    inference_only("int8_gemm", "x residual", x, residual)
    args = (x, qweight, scales, mins, out_features, bias, norm_weight, eps, activation, residual, activation_bits)
    if out is not None:
        return into(out, ops.int8_gemm, *args)
    return ops.int8_gemm.default(*args)


def int6_gemm(
    x: Tensor,
    qweight: Tensor,
    scales: Tensor,
    out_features: int,
    *,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    activation: str | None = None,
    residual: Tensor | None = None,
    activation_bits: int = 32,
    out: Tensor | None = None,
) -> Tensor:
    """Compute a linear layer with a 6-bit weight ``w = scale * q``, q in -32..31, as GGUF's Q6_K has it.

    Args:
        qweight: packed weight from :func:`int6_pack`.
        scales: packed scales from :func:`pack_two_level_scales`: an int8 per row and group of 16 inputs, times an fp16
            per row and 256 inputs.
        x, out_features, bias, norm_weight, eps, activation, residual, out: as in :func:`int8_gemm`.
        activation_bits: as in :func:`int8_gemm`; with 16, too, each run of 16 inputs has its own scale.

    Returns:
        The same as :func:`int8_gemm`.

    Raises:
        RuntimeError: the same as :func:`int8_gemm`.

    Devices: CPU.

    Source: Q6_K, https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h; two-level scales: Dai et al., 2021,
    https://arxiv.org/abs/2102.04503, section 4.

    >>> import torch, fastinfer.ops as ops
    >>> q = torch.randint(-32, 32, (32, 256), dtype=torch.int8)
    >>> integers, factors = torch.randint(-128, 128, (32, 16), dtype=torch.int8), torch.rand(32, 1).half() / 1024
    >>> x, weight = torch.randn(3, 256), q * (integers * factors.float()).repeat_interleave(16, dim=1)
    >>> out = ops.int6_gemm(x, ops.int6_pack(q), ops.pack_two_level_scales(integers, factors), out_features=32)
    >>> torch.allclose(out, x @ weight.T, rtol=1e-4, atol=1e-3)
    True
    """
    inference_only("int6_gemm", "x residual", x, residual)
    args = (x, qweight, scales, out_features, bias, norm_weight, eps, activation, residual, activation_bits)
    if out is not None:
        return into(out, ops.int6_gemm, *args)
    return ops.int6_gemm.default(*args)


def int5_gemm(
    x: Tensor,
    qweight: Tensor,
    scales: Tensor,
    mins: Tensor | None,
    out_features: int,
    *,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    activation: str | None = None,
    residual: Tensor | None = None,
    activation_bits: int = 32,
    out: Tensor | None = None,
) -> Tensor:
    """Compute a linear layer with a 5-bit weight ``w = scale * q + min``, q in 0..31, as GGUF's Q5_0 and Q5_K have it.

    Args:
        qweight: packed weight from :func:`int5_pack`.
        scales: packed scales from :func:`pack_scales`, or from :func:`pack_two_level_scales` in groups of 32.
        mins: packed minimums, like ``scales``; ``None`` for the symmetric ``w = scale * (q - 16)``.
        x, out_features, bias, norm_weight, eps, activation, residual, activation_bits, out: as in
            :func:`int8_gemm`.

    Returns:
        The same as :func:`int8_gemm`.

    Raises:
        RuntimeError: the same as :func:`int8_gemm`.

    Devices: CPU.

    Source: Q5_0, Q5_1 and Q5_K, https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h.

    >>> import torch, fastinfer.ops as ops
    >>> q, scales = torch.randint(0, 32, (32, 64), dtype=torch.uint8), torch.rand(32, 2) / 16
    >>> x, weight = torch.randn(3, 64), (q.float() - 16) * scales.repeat_interleave(32, dim=1)
    >>> out = ops.int5_gemm(x, ops.int5_pack(q), ops.pack_scales(scales), None, out_features=32)
    >>> torch.allclose(out, x @ weight.T, atol=1e-3)
    True
    """
    inference_only("int5_gemm", "x residual", x, residual)
    args = (x, qweight, scales, mins, out_features, bias, norm_weight, eps, activation, residual, activation_bits)
    if out is not None:
        return into(out, ops.int5_gemm, *args)
    return ops.int5_gemm.default(*args)


def int4_gemm(
    x: Tensor,
    qweight: Tensor,
    scales: Tensor,
    mins: Tensor | None,
    out_features: int,
    *,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    activation: str | None = None,
    residual: Tensor | None = None,
    activation_bits: int = 32,
    out: Tensor | None = None,
) -> Tensor:
    """Compute a linear layer with a 4-bit weight ``w = scale * q + min``, q in 0..15.

    Args:
        qweight: packed weight from :func:`int4_pack`, packed on the device of ``x``.
        scales: packed scales from :func:`pack_scales`, or on a CPU from :func:`pack_two_level_scales` in groups of 32.
        mins: packed minimums, like ``scales``; ``None`` for the symmetric ``w = scale * (q - 8)``.
        x, out_features, bias, norm_weight, eps, activation, residual, activation_bits, out: as in
            :func:`int8_gemm`.

    Returns:
        The same as :func:`int8_gemm`.

    Raises:
        RuntimeError: the same as :func:`int8_gemm`.

    Devices: CPU, CUDA.

    Source: one scale per group: Frantar et al., 2022, https://arxiv.org/abs/2210.17323; weights packed in the order of
    the tensor cores' operands: MARLIN, Frantar et al., 2024, https://arxiv.org/abs/2408.11743.

    >>> import torch, fastinfer.ops as ops
    >>> q = torch.randint(0, 16, (64, 64), dtype=torch.uint8)  # 32 rows of the gate, then 32 of up
    >>> scales, mins = torch.rand(64, 2) / 16, -torch.rand(64, 2)
    >>> packed = ops.int4_pack(q), ops.pack_scales(scales), ops.pack_scales(mins)
    >>> x, weight = torch.randn(3, 64), q * scales.repeat_interleave(32, 1) + mins.repeat_interleave(32, 1)
    >>> torch.allclose(ops.int4_gemm(x, *packed, out_features=64), x @ weight.T, atol=1e-3)
    True
    >>> rows = ops.interleave_gate_up(*torch.arange(64).chunk(2))  # the order that a gated activation expects
    >>> packed = ops.int4_pack(q[rows]), ops.pack_scales(scales[rows]), ops.pack_scales(mins[rows])
    >>> swiglu = ops.int4_gemm(x, *packed, out_features=64, activation="silu")
    >>> torch.allclose(swiglu, ops.silu_and_mul(x @ weight.T), atol=1e-3)
    True
    """
    inference_only("int4_gemm", "x residual", x, residual)
    args = (x, qweight, scales, mins, out_features, bias, norm_weight, eps, activation, residual, activation_bits)
    if out is not None:
        return into(out, ops.int4_gemm, *args)
    return ops.int4_gemm.default(*args)


def lut_gemm(
    x: Tensor,
    qweight: Tensor,
    scales: Tensor,
    table: Tensor,
    out_features: int,
    *,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    activation: str | None = None,
    residual: Tensor | None = None,
    activation_bits: int = 32,
    out: Tensor | None = None,
) -> Tensor:
    """Compute a linear layer with a 4-bit look-up table weight ``w = scale * table[q]``: MXFP4, NF4 and the like.

    Args:
        qweight: packed weight from :func:`int4_pack`.
        table: [16] fp32, the look-up table; on a GPU its values are rounded to the dtype of ``x``.
        activation_bits: as in :func:`int8_gemm`; with 8 and 16 the table must have integers -128..127. Those of MXFP4
            and NVFP4, times 2, and of IQ4_NL are integers; those of NF4 are not.
        x, scales, out_features, bias, norm_weight, eps, activation, residual, out: as in :func:`int8_gemm`.

    Returns:
        The same as :func:`int8_gemm`.

    Raises:
        RuntimeError: the same as :func:`int8_gemm`; the table has other numbers than ``activation_bits`` allows.

    Devices: CPU, CUDA.

    Source: NF4: Dettmers et al., 2023, https://arxiv.org/abs/2305.14314, section 3; MXFP4: OCP Microscaling Formats,
    2023, https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf.

    >>> import torch, fastinfer.ops as ops
    >>> q, scales = torch.randint(0, 16, (32, 64), dtype=torch.uint8), torch.rand(32, 1)  # one group per row
    >>> x, table = torch.randn(3, 64), torch.linspace(-1, 1, 16)
    >>> out = ops.lut_gemm(x, ops.int4_pack(q), ops.pack_scales(scales), table, out_features=32)
    >>> torch.allclose(out, x @ (table[q.long()] * scales).T, atol=1e-3)
    True
    >>> integers = torch.tensor([0.0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12])  # MXFP4, times 2
    >>> packed = ops.int4_pack(q), ops.pack_scales(scales), integers
    >>> exact, quick = (ops.lut_gemm(x, *packed, out_features=32, activation_bits=bits) for bits in (32, 8))
    >>> float((quick - exact).norm() / exact.norm()) < 0.01
    True
    """
    inference_only("lut_gemm", "x residual", x, residual)
    args = (x, qweight, scales, table, out_features, bias, norm_weight, eps, activation, residual, activation_bits)
    if out is not None:
        return into(out, ops.lut_gemm, *args)
    return ops.lut_gemm.default(*args)
