"""Exchange of activations between the processes (ranks) that compute a model together on one machine.

Each rank makes the same calls in the same order. Ranks on CPUs share the memory of a group, see
:class:`fastinfer.parallel.group.Group`. A call waits for the other ranks; it raises if one of them does not arrive
within the group's deadline, makes another call, or has ended.

Ranks on GPUs address each other's memory, see :class:`fastinfer.parallel.peer_group.PeerGroup`, whose table is the
argument ``group``. There a kernel waits, also only until the deadline; the host then finds the group aborted.
"""

from collections.abc import Sequence

from torch import Tensor

from fastinfer.ops._library import inference_only, into, ops


def all_gather(x: Tensor, group: Tensor, rank: int, widths: Sequence[int], *, out: Tensor | None = None) -> Tensor:
    """Put together the columns of activations that the ranks have: ``torch.cat`` of their ``x`` along dimension 1.

    Args:
        x: [rows, widths[rank]], this rank's columns; fp32, bf16 or fp16; contiguous.
        group: [bytes] uint8, the memory that the ranks share.
        rank: number of this rank.
        widths: number of columns of each rank, the same on all ranks.
        out: receives the result; see :mod:`fastinfer.ops`.

    Returns:
        [rows, sum(widths)], the same on all ranks; dtype of ``x``.

    Raises:
        RuntimeError: a shape, dtype or stride does not fit; a rank did not arrive in time, makes another call, or has
            ended.

    Devices: CPU, CUDA (not yet run on several GPUs).

    Source: the collective of MPI and NCCL, along columns; https://www.mpi-forum.org/docs/.

    >>> import torch, fastinfer.ops as ops
    >>> from fastinfer.parallel.group import Group
    >>> group = Group.create(1)
    >>> ops.all_gather(torch.tensor([[1.0, 2.0]]), group.memory, 0, [2])
    tensor([[1., 2.]])
    """
    inference_only("all_gather", "x", x)
    if out is not None:
        return into(out, ops.all_gather, x, group, rank, widths)
    return ops.all_gather.default(x, group, rank, widths)


def all_gather_rows(
    x: Tensor, ids: Tensor, group: Tensor, rank: int, start: int, end: int, *, out: Tensor | None = None
) -> Tensor:
    """Put together rows of a table that the ranks have in parts: row i comes from the rank that has ``ids[i]``.

    Args:
        x: [rows, columns]; fp32, bf16 or fp16; contiguous. Rows whose ids are not this rank's are not read.
        ids: [rows] int64, the same on all ranks; contiguous.
        group: [bytes] uint8, the memory that the ranks share.
        rank: number of this rank.
        start, end: range of ids that this rank has. The ranges of all ranks must not overlap and contain all ids: a
            row whose id is in none of them is undefined.
        out: receives the result; see :mod:`fastinfer.ops`.

    Returns:
        [rows, columns], the same on all ranks; dtype of ``x``.

    Raises:
        RuntimeError: as for :func:`all_gather`.

    Devices: CPU, CUDA (not yet run on several GPUs).

    Source: the embedding of Megatron-LM (https://arxiv.org/abs/1909.08053), with copies in place of sums with zeros.

    >>> import torch, fastinfer.ops as ops
    >>> from fastinfer.parallel.group import Group
    >>> group = Group.create(1)
    >>> ops.all_gather_rows(torch.tensor([[1.0, 2.0]]), torch.tensor([7]), group.memory, 0, 0, 8)
    tensor([[1., 2.]])
    """
    inference_only("all_gather_rows", "x", x)
    if out is not None:
        return into(out, ops.all_gather_rows, x, ids, group, rank, start, end)
    return ops.all_gather_rows.default(x, ids, group, rank, start, end)


def all_reduce(x: Tensor, group: Tensor, rank: int, *, out: Tensor | None = None) -> Tensor:
    """Sum of the activations that the ranks have: of their ``x``, in fp32 and in the order of the ranks.

    Args:
        x: [...], of the same shape on all ranks; fp32, bf16 or fp16; contiguous.
        group: [bytes] uint8, the memory that the ranks share.
        rank: number of this rank.
        out: receives the result; see :mod:`fastinfer.ops`. It may be ``x``.

    Returns:
        Shape and dtype of ``x``; the same bits on all ranks, whatever their timing.

    Raises:
        RuntimeError: as for :func:`all_gather`.

    Devices: CPU, CUDA (not yet run on several GPUs).

    Source: the collective of MPI and NCCL, https://www.mpi-forum.org/docs/. Every rank reads the parts of all others
    and adds them up itself (the "one-shot" form).

    >>> import torch, fastinfer.ops as ops
    >>> from fastinfer.parallel.group import Group
    >>> group = Group.create(1)
    >>> ops.all_reduce(torch.tensor([[1.0, 2.0]]), group.memory, 0)
    tensor([[1., 2.]])
    """
    inference_only("all_reduce", "x", x)
    if out is not None:
        return into(out, ops.all_reduce, x, group, rank)
    return ops.all_reduce.default(x, group, rank)


def all_reduce_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    group: Tensor,
    rank: int,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Add the sum of all ranks to the residual, and normalise the result: ``all_reduce``, then ``add_rms_norm``.

    Args:
        x: [..., hidden], of the same shape on all ranks; fp32, bf16 or fp16; contiguous.
        residual: shape and dtype of ``x``; contiguous; receives ``residual + sum``. The same on all ranks.
        weight: [hidden]; fp32 or the dtype of ``x``.
        eps: added to the mean of the squares.
        group: [bytes] uint8, the memory that the ranks share.
        rank: number of this rank.
        out: receives the result; see :mod:`fastinfer.ops`. It may be ``x``.

    Returns:
        Shape and dtype of ``x``; bit for bit what the two operators give one after the other.

    Raises:
        RuntimeError: as for :func:`all_reduce`.

    Devices: CPU, CUDA (not yet run on several GPUs).

    Source: the fused kernel of TensorRT-LLM and FlashInfer for tensor parallelism; one launch in place of two.

    >>> import torch, fastinfer.ops as ops
    >>> from fastinfer.parallel.group import Group
    >>> group = Group.create(1)
    >>> x, residual = torch.tensor([[1.0, 2.0]]), torch.tensor([[2.0, 2.0]])
    >>> ops.all_reduce_add_rms_norm(x, residual, torch.ones(2), 0.0, group.memory, 0)
    tensor([[0.8485, 1.1314]])
    """
    inference_only("all_reduce_add_rms_norm", "x residual", x, residual)
    if out is not None:
        return into(out, ops.all_reduce_add_rms_norm, x, residual, weight, eps, group, rank)
    return ops.all_reduce_add_rms_norm.default(x, residual, weight, eps, group, rank)


def local_ids(ids: Tensor, start: int, end: int, *, out: Tensor | None = None) -> Tensor:
    """Number the ids of one rank's part of a table from 0: ``ids - start``, and 0 for the ids of other ranks.

    Args:
        ids: [rows] int64; contiguous.
        start, end: range of ids in the part.
        out: receives the result; see :mod:`fastinfer.ops`.

    Returns:
        [rows] int64.

    Raises:
        RuntimeError: a shape, dtype or stride does not fit, or the range is empty.

    Devices: CPU, CUDA.

    Source: as for :func:`all_gather_rows`, whose input is looked up by these ids.

    >>> import torch, fastinfer.ops as ops
    >>> ops.local_ids(torch.tensor([3, 9, 4]), 3, 6)
    tensor([0, 0, 1])
    """
    if out is not None:
        return into(out, ops.local_ids, ids, start, end)
    return ops.local_ids.default(ids, start, end)
