"""Mixture of experts: routing of tokens to experts, grouped products, and the weighted sum of the results.

Every token has ``top_k`` *rows*, one for each of its experts: row ``token * top_k + i`` belongs to expert
``expert_ids[token, i]``. All tensors of rows have this order. A grouped product multiplies each row by the weight of
its expert, a slice of one tensor with the weights of all experts. Only ``row_ids``, the order in which the product
processes the rows, is sorted by expert.

>>> import torch, fastinfer.ops as ops
>>> x, residual = torch.randn(3, 64), torch.zeros(3, 64)
>>> gate_up, down = torch.randn(4, 96, 64), torch.randn(4, 64, 48)
>>> routing = ops.route_experts(torch.randn(3, 4), top_k=2, renormalize=True)
>>> hidden = ops.grouped_gemm(x, gate_up, routing.row_ids, routing.expert_start, activation="silu")
>>> rows = ops.grouped_gemm(hidden, down, routing.row_ids, routing.expert_start)
>>> ops.combine_experts(rows, routing.expert_weights, residual).shape
torch.Size([3, 64])

All shapes follow from the shapes of the arguments, and nothing is copied back to the host, so calls can be recorded as
a graph. On the CPU a token's result is bitwise the same in any batch. On a GPU it depends on the token tile, which the
size of the batch determines (8, 32 or 128 tokens, chosen for rows evenly spread over the experts), but not on the other
tokens; under :func:`fastinfer.ops.batch_invariant` it depends only on the token.
"""

from typing import NamedTuple

from torch import Tensor

from fastinfer.ops._library import inference_only, into, ops


class Routing(NamedTuple):
    """Experts of a batch's tokens, the result of :func:`route_experts`.

    Attributes:
        expert_weights: [tokens, top_k] fp32; weights of each token's experts, the first choice first.
        expert_ids: [tokens, top_k] int32; the experts in the same order.
        row_ids: [tokens * top_k] int32; rows sorted by expert, and by row for the same expert.
        expert_start: [experts + 1] int32; expert ``e`` has the rows ``row_ids[expert_start[e]:expert_start[e + 1]]``.

    >>> import torch, fastinfer.ops as ops
    >>> routing = ops.route_experts(torch.tensor([[2.0, 0.0, 1.0], [0.0, 3.0, 1.0]]), top_k=2, renormalize=True)
    >>> [rows.tolist() for rows in routing.row_ids.tensor_split(routing.expert_start[1:-1].tolist())]  # per expert
    [[0], [2], [1, 3]]
    """

    expert_weights: Tensor
    expert_ids: Tensor
    row_ids: Tensor
    expert_start: Tensor


def route_experts(
    logits: Tensor,
    top_k: int,
    renormalize: bool,
    *,
    scoring: str = "softmax",
    bias: Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    scale: float = 1.0,
    expert_scale: Tensor | None = None,
    jitter: float = 0.01,
    biased_logits: bool = False,
) -> Routing:
    """Choose the ``top_k`` experts with the largest scores for each token, weighted by their scores.

    Args:
        logits: [tokens, experts], the router's output; fp32, bf16 or fp16; rows may be strided. At most 1024 experts.
        top_k: number of experts per token, 1 .. 32 and at most the number of experts in ``top_groups`` groups.
        renormalize: whether to divide a token's weights by their sum (Mixtral, https://arxiv.org/abs/2401.04088;
            Qwen3-MoE if its ``norm_topk_prob`` is set).
        scoring: ``"softmax"`` over all experts, ``"sigmoid"`` of each logit (DeepSeek-V3), or ``"sparsemixer"``
            (Phi-3.5-MoE): softmax of the largest logit m among those that are not chosen yet, of which a logit x takes
            part if (m - x) / max(|x|, m) is at most ``2 * jitter``. This one has neither bias nor groups, and its
            weights are not divided by their sum.
        bias: [experts] fp32, contiguous; added to the scores for the choice, not for the weights.
        num_groups: number of groups of neighbouring experts, at most 32, with at least two experts each.
        top_groups: number of groups that the experts are chosen from: those with the largest sums of two scores, with
            their biases.
        scale: factor of the weights.
        expert_scale: [experts] fp32, contiguous; each expert's own factor of its weights.
        jitter: half the tolerance of ``"sparsemixer"``, from 0 to 1; means nothing to the others.
        biased_logits: whether ``bias``, which must be there, is added to the logits instead of the scores (Kolibri 1);
            not with groups.

    Returns:
        The :class:`Routing`. Between equal scores the expert with the smaller index is chosen. Scores are computed in
        fp32. A NaN among a token's logits makes all its weights NaN with softmax; with sigmoid only that expert's
        score is NaN.

    Raises:
        RuntimeError: a shape, dtype or stride does not fit; there are too many experts, or ``top_k`` or ``jitter`` is
            out of range; ``scoring`` is unknown, or ``"sparsemixer"`` or ``biased_logits`` with what it does not have.

    Devices: CPU, CUDA.

    Source: Shazeer et al., 2017, https://arxiv.org/abs/1701.06538; the softmax before the choice: Fedus et al., 2021,
    https://arxiv.org/abs/2101.03961; sigmoids, bias and groups: DeepSeek-V3, https://arxiv.org/abs/2412.19437;
    SparseMixer: Liu et al., 2024, https://arxiv.org/abs/2409.12136, and Phi-3.5-MoE in transformers; biased logits:
    Kolibri1TopKRouter in transformers.

    >>> import torch, fastinfer.ops as ops
    >>> routing = ops.route_experts(torch.tensor([[2.0, 0.0, 1.0], [0.0, 3.0, 1.0]]), top_k=2, renormalize=True)
    >>> routing.expert_ids
    tensor([[0, 2],
            [1, 2]], dtype=torch.int32)
    >>> routing.expert_weights
    tensor([[0.7311, 0.2689],
            [0.8808, 0.1192]])
    """
    inference_only("route_experts", "logits", logits)
    options = {"scoring": scoring, "bias": bias, "num_groups": num_groups, "top_groups": top_groups, "scale": scale}
    options |= {"expert_scale": expert_scale, "jitter": jitter, "biased_logits": biased_logits}
    return Routing(*ops.route_experts.default(logits, top_k, renormalize, **options))


class HeadRows(NamedTuple):
    """Rows of heads instead of experts, the result of :func:`head_rows`.

    Attributes:
        row_ids: [tokens * heads] int32; rows sorted by head, and by token for the same head.
        expert_start: [heads + 1] int32; head ``h`` has the rows ``row_ids[expert_start[h]:expert_start[h + 1]]``.

    >>> import torch, fastinfer.ops as ops
    >>> ops.head_rows(torch.arange(2), 3).expert_start
    tensor([0, 2, 4, 6], dtype=torch.int32)
    """

    row_ids: Tensor
    expert_start: Tensor


def head_rows(positions: Tensor, heads: int) -> HeadRows:
    """List the rows of each head, with which a grouped product multiplies each head by a matrix of its own.

    Row ``token * heads + head`` of [tokens * heads, in_features] belongs to a head, as if that were its expert.

    Args:
        positions: [tokens] int64; only its length counts.
        heads: number of heads, 1 .. 1024.

    Returns:
        The :class:`HeadRows`.

    Raises:
        RuntimeError: the dtype does not fit, or there are too many heads or rows.

    Devices: CPU, CUDA.

    Source: the products per head of multi-head latent attention: DeepSeek-V2, https://arxiv.org/abs/2405.04434.

    >>> import torch, fastinfer.ops as ops
    >>> x, weight = torch.randn(5, 3, 64), torch.randn(3, 32, 64)  # of five tokens and three heads
    >>> out = ops.grouped_gemm(x.flatten(0, 1), weight, *ops.head_rows(torch.arange(5), 3))
    >>> torch.allclose(out.view(5, 3, 32), torch.einsum("thk,hnk->thn", x, weight), atol=1e-4)
    True
    """
    return HeadRows(*ops.head_rows.default(positions, heads))


def grouped_gemm(
    x: Tensor,
    weight: Tensor,
    row_ids: Tensor,
    expert_start: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Multiply each row by the weight of its expert.

    Args:
        x: [tokens, in_features], where all ``rows / tokens`` rows of a token read the token's input without a copy; or
            [rows, in_features]. fp32 (CPU), bf16 or fp16; rows may be strided.
        weight: [experts, out_features, in_features]; dtypes as in :func:`fastinfer.ops.gemm`.
        row_ids, expert_start: results of :func:`route_experts` or :func:`head_rows`; ``rows`` is the length of
            ``row_ids``. A slice of ``expert_start`` leaves out experts, whose rows are then not computed: they are
            undefined, and as inputs [rows, in_features] they are not read.
        bias: [experts, out_features]; fp32 or the dtype of ``x``; each row gets that of its expert.
        activation: name of a gated activation, for interleaved gate and up rows, or ``None``; see
            :mod:`fastinfer.ops.gemm`.
        out: receives the result; see :mod:`fastinfer.ops`.

    Returns:
        [rows, out_features] (``out_features / 2`` with an activation), dtype of ``x``. Accumulated in fp32. Weights of
        experts without rows are not read.

    Raises:
        RuntimeError: a shape, dtype, device or stride does not fit; ``activation`` is unknown; on the CPU also if a row
            index is out of range or ``expert_start`` decreases.

    Devices: CPU, CUDA.

    Source: one product over rows sorted by expert: MegaBlocks, Gale et al., 2022, https://arxiv.org/abs/2211.15841.

    >>> import torch, fastinfer.ops as ops
    >>> routing = ops.route_experts(torch.randn(3, 4), top_k=2, renormalize=True)
    >>> rows = routing.row_ids, routing.expert_start
    >>> x, weight = torch.randn(3, 64), torch.randn(4, 96, 64)
    >>> out = ops.grouped_gemm(x, weight, *rows)
    >>> chosen = weight[routing.expert_ids]  # [tokens, top_k, out_features, in_features], a large copy
    >>> torch.allclose(out.view(3, 2, 96), torch.einsum("ti,tkoi->tko", x, chosen), atol=1e-3)
    True
    """
    inference_only("grouped_gemm", "x", x)
    if out is not None:
        return into(out, ops.grouped_gemm, x, weight, row_ids, expert_start, bias, activation)
    return ops.grouped_gemm.default(x, weight, row_ids, expert_start, bias, activation)


def grouped_int8_gemm(
    x: Tensor,
    qweight: Tensor,
    scales: Tensor,
    mins: Tensor | None,
    out_features: int,
    row_ids: Tensor,
    expert_start: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    activation_bits: int = 32,
    out: Tensor | None = None,
) -> Tensor:
    """Multiply each row by the 8-bit weight of its expert, as :func:`grouped_gemm` does for dense weights.

    Args:
        qweight: [experts, tiles, in_features / 32, 8, 16, 4]; each expert packed by :func:`int8_pack`.
        scales: [experts, tiles, groups, 16]; each expert packed by :func:`pack_scales`.
        mins: packed minimums, like ``scales``, or ``None``.
        out_features, activation_bits: as in :func:`fastinfer.ops.int8_gemm`.
        x, row_ids, expert_start, bias, activation: as in :func:`grouped_gemm`.
        out: receives the result; see :mod:`fastinfer.ops`.

    Returns:
        The same as :func:`grouped_gemm`.

    Raises:
        RuntimeError: the same as :func:`grouped_gemm`.

    Devices: CPU, CUDA.

    Source: one product over rows sorted by expert: MegaBlocks, Gale et al., 2022, https://arxiv.org/abs/2211.15841.

    >>> import torch, fastinfer.ops as ops
    >>> routing = ops.route_experts(torch.randn(3, 4), top_k=2, renormalize=True)
    >>> rows = routing.row_ids, routing.expert_start
    >>> x, q = torch.randn(3, 64), torch.randint(-128, 128, (4, 32, 64), dtype=torch.int8)
    >>> qweight = torch.stack([ops.int8_pack(expert) for expert in q])
    >>> scales = torch.ones(4, 2, 1, 16)  # one group per row
    >>> out = ops.grouped_int8_gemm(x, qweight, scales, None, 32, *rows)
    >>> torch.allclose(out, ops.grouped_gemm(x, q.float(), *rows), rtol=1e-3, atol=1e-2)
    True
    """
    inference_only("grouped_int8_gemm", "x", x)
    args = (x, qweight, scales, mins, out_features, row_ids, expert_start, bias, activation, activation_bits)
    if out is not None:
        return into(out, ops.grouped_int8_gemm, *args)
    return ops.grouped_int8_gemm.default(*args)


def grouped_int6_gemm(
    x: Tensor,
    qweight: Tensor,
    scales: Tensor,
    out_features: int,
    row_ids: Tensor,
    expert_start: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    activation_bits: int = 32,
    out: Tensor | None = None,
) -> Tensor:
    """Multiply each row by the 6-bit weight of its expert, as :func:`grouped_gemm` does for dense weights.

    Args:
        qweight: [experts, tiles, in_features / 32, 6, 16, 4]; each expert packed by :func:`int6_pack`.
        scales: [experts, tiles, in_features / 256, 18, 16]; each expert packed by :func:`pack_two_level_scales`.
        out_features, activation_bits: as in :func:`fastinfer.ops.int6_gemm`.
        x, row_ids, expert_start, bias, activation, out: as in :func:`grouped_gemm`.

    Returns:
        The same as :func:`grouped_gemm`.

    Raises:
        RuntimeError: the same as :func:`grouped_gemm`.

    Devices: CPU.

    Source: one product over rows sorted by expert: MegaBlocks, Gale et al., 2022, https://arxiv.org/abs/2211.15841.

    >>> import torch, fastinfer.ops as ops
    >>> routing = ops.route_experts(torch.randn(3, 4), top_k=2, renormalize=True)
    >>> rows = routing.row_ids, routing.expert_start
    >>> x, q = torch.randn(3, 256), torch.randint(-32, 32, (4, 32, 256), dtype=torch.int8)
    >>> qweight = torch.stack([ops.int6_pack(expert) for expert in q])
    >>> one = ops.pack_two_level_scales(torch.ones(32, 16, dtype=torch.int8), torch.ones(32, 1).half())
    >>> out = ops.grouped_int6_gemm(x, qweight, torch.stack([one] * 4), 32, *rows)
    >>> torch.allclose(out, ops.grouped_gemm(x, q.float(), *rows), rtol=1e-3, atol=1e-2)
    True
    """
    inference_only("grouped_int6_gemm", "x", x)
    args = (x, qweight, scales, out_features, row_ids, expert_start, bias, activation, activation_bits)
    if out is not None:
        return into(out, ops.grouped_int6_gemm, *args)
    return ops.grouped_int6_gemm.default(*args)


def grouped_int5_gemm(
    x: Tensor,
    qweight: Tensor,
    scales: Tensor,
    mins: Tensor | None,
    out_features: int,
    row_ids: Tensor,
    expert_start: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    activation_bits: int = 32,
    out: Tensor | None = None,
) -> Tensor:
    """Multiply each row by the 5-bit weight of its expert, as :func:`grouped_gemm` does for dense weights.

    Args:
        qweight: [experts, tiles, in_features / 32, 5, 16, 4]; each expert packed by :func:`int5_pack`.
        scales, mins: as in :func:`grouped_int8_gemm`; ``mins=None`` as in :func:`fastinfer.ops.int5_gemm`.
        out_features, activation_bits: as in :func:`fastinfer.ops.int8_gemm`.
        x, row_ids, expert_start, bias, activation, out: as in :func:`grouped_gemm`.

    Returns:
        The same as :func:`grouped_gemm`.

    Raises:
        RuntimeError: the same as :func:`grouped_gemm`.

    Devices: CPU.

    Source: one product over rows sorted by expert: MegaBlocks, Gale et al., 2022, https://arxiv.org/abs/2211.15841.

    >>> import torch, fastinfer.ops as ops
    >>> routing = ops.route_experts(torch.randn(3, 4), top_k=2, renormalize=True)
    >>> rows = routing.row_ids, routing.expert_start
    >>> x, q = torch.randn(3, 64), torch.randint(0, 32, (4, 32, 64), dtype=torch.uint8)
    >>> qweight = torch.stack([ops.int5_pack(expert) for expert in q])
    >>> scales = torch.ones(4, 2, 1, 16)  # one group per row
    >>> out = ops.grouped_int5_gemm(x, qweight, scales, None, 32, *rows)
    >>> torch.allclose(out, ops.grouped_gemm(x, q.float() - 16, *rows), atol=1e-3)
    True
    """
    inference_only("grouped_int5_gemm", "x", x)
    args = (x, qweight, scales, mins, out_features, row_ids, expert_start, bias, activation, activation_bits)
    if out is not None:
        return into(out, ops.grouped_int5_gemm, *args)
    return ops.grouped_int5_gemm.default(*args)


def grouped_int4_gemm(
    x: Tensor,
    qweight: Tensor,
    scales: Tensor,
    mins: Tensor | None,
    out_features: int,
    row_ids: Tensor,
    expert_start: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    activation_bits: int = 32,
    out: Tensor | None = None,
) -> Tensor:
    """Multiply each row by the 4-bit weight of its expert, as :func:`grouped_gemm` does for dense weights.

    Args:
        qweight: [experts, tiles, in_features / 32, 4, 16, 4]; each expert packed by :func:`int4_pack`.
        scales, mins: as in :func:`grouped_int8_gemm`; ``mins=None`` as in :func:`fastinfer.ops.int4_gemm`.
        out_features, activation_bits: as in :func:`fastinfer.ops.int8_gemm`.
        x, row_ids, expert_start, bias, activation, out: as in :func:`grouped_gemm`.

    Returns:
        The same as :func:`grouped_gemm`.

    Raises:
        RuntimeError: the same as :func:`grouped_gemm`.

    Devices: CPU, CUDA.

    Source: one product over rows sorted by expert: MegaBlocks, Gale et al., 2022, https://arxiv.org/abs/2211.15841.

    >>> import torch, fastinfer.ops as ops
    >>> routing = ops.route_experts(torch.randn(3, 4), top_k=2, renormalize=True)
    >>> rows = routing.row_ids, routing.expert_start
    >>> x, q = torch.randn(3, 64), torch.randint(0, 16, (4, 32, 64), dtype=torch.uint8)
    >>> qweight = torch.stack([ops.int4_pack(expert) for expert in q])
    >>> scales = torch.ones(4, 2, 1, 16)  # one group per row
    >>> out = ops.grouped_int4_gemm(x, qweight, scales, None, 32, *rows)
    >>> torch.allclose(out, ops.grouped_gemm(x, q.float() - 8, *rows), atol=1e-3)
    True
    """
    inference_only("grouped_int4_gemm", "x", x)
    args = (x, qweight, scales, mins, out_features, row_ids, expert_start, bias, activation, activation_bits)
    if out is not None:
        return into(out, ops.grouped_int4_gemm, *args)
    return ops.grouped_int4_gemm.default(*args)


def grouped_lut_gemm(
    x: Tensor,
    qweight: Tensor,
    scales: Tensor,
    table: Tensor,
    out_features: int,
    row_ids: Tensor,
    expert_start: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    activation_bits: int = 32,
    out: Tensor | None = None,
) -> Tensor:
    """Multiply each row by the 4-bit look-up table weight ``w = scale * table[q]`` of its expert.

    Args:
        table: [16] fp32, the look-up table of all experts; see :func:`fastinfer.ops.lut_gemm`.
        qweight, scales: as in :func:`grouped_int4_gemm`.
        out_features: as in :func:`fastinfer.ops.int8_gemm`.
        activation_bits: as in :func:`fastinfer.ops.lut_gemm`.
        x, row_ids, expert_start, bias, activation, out: as in :func:`grouped_gemm`.

    Returns:
        The same as :func:`grouped_gemm`.

    Raises:
        RuntimeError: the same as :func:`grouped_gemm`; the table has other numbers than ``activation_bits`` allows.

    Devices: CPU, CUDA.

    Source: one product over rows sorted by expert: MegaBlocks, Gale et al., 2022, https://arxiv.org/abs/2211.15841.

    >>> import torch, fastinfer.ops as ops
    >>> routing = ops.route_experts(torch.randn(3, 4), top_k=2, renormalize=True)
    >>> rows = routing.row_ids, routing.expert_start
    >>> x, q = torch.randn(3, 64), torch.randint(0, 16, (4, 32, 64), dtype=torch.uint8)
    >>> qweight, table = torch.stack([ops.int4_pack(expert) for expert in q]), torch.linspace(-1, 1, 16)
    >>> out = ops.grouped_lut_gemm(x, qweight, torch.ones(4, 2, 1, 16), table, 32, *rows)
    >>> torch.allclose(out, ops.grouped_gemm(x, table[q.long()], *rows), atol=1e-3)
    True
    """
    inference_only("grouped_lut_gemm", "x", x)
    args = (x, qweight, scales, table, out_features, row_ids, expert_start, bias, activation, activation_bits)
    if out is not None:
        return into(out, ops.grouped_lut_gemm, *args)
    return ops.grouped_lut_gemm.default(*args)


def combine_experts(
    x: Tensor,
    expert_weights: Tensor,
    residual: Tensor | None = None,
    expert_ids: Tensor | None = None,
    start: int = 0,
    end: int = 0,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Add up each token's rows, weighted, and the residual.

    Args:
        x: [tokens * top_k, hidden], result of a grouped product; fp32, bf16 or fp16; contiguous.
        expert_weights: [tokens, top_k] fp32, contiguous; from :func:`route_experts`.
        residual: [tokens, hidden], dtype of ``x``, contiguous; added after the rows.
        expert_ids: [tokens, top_k] int32, contiguous; from :func:`route_experts`. With them only the rows of experts
            ``start .. end - 1`` are added, and the others are not read. ``None`` for all rows.
        start, end: see above.
        out: receives the result; may be ``residual``; see :mod:`fastinfer.ops`.

    Returns:
        [tokens, hidden], dtype of ``x``. Summed in fp32, in the order of a token's experts.

    Raises:
        RuntimeError: a shape, dtype or device does not fit.

    Devices: CPU, CUDA.

    Source: Shazeer et al., 2017, https://arxiv.org/abs/1701.06538.

    >>> import torch, fastinfer.ops as ops
    >>> x = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]])  # two rows per token
    >>> ops.combine_experts(x, torch.tensor([[0.5, 0.5], [1.0, 0.0]]))
    tensor([[2., 3.],
            [5., 6.]])
    """
    inference_only("combine_experts", "x residual", x, residual)
    inference_only("combine_experts", "expert_weights", expert_weights)
    if out is not None:
        return into(out, ops.combine_experts, x, expert_weights, residual, expert_ids, start, end)
    return ops.combine_experts.default(x, expert_weights, residual, expert_ids, start, end)
