"""Low-rank adapters (LoRA) for batches that mix them."""

from torch import Tensor

from fastinfer.ops._library import inference_only, ops


def add_lora(
    y: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    adapter_ids: Tensor,
    *,
    ranks: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
) -> None:
    """Add to each row of ``y``, in place, what its token's adapter adds to a linear layer: ``(x @ a[id].T) @ b[id]``.

    Shrunk to the rank and expanded, with fp32 sums between and within the two and one rounding at the end. A token's
    result is bitwise the same in any batch.

    Args:
        y: [tokens, out]; fp32, bf16 or fp16; changed in place. Rows are contiguous, any distance apart. Or
            [tokens, runs, run], whose runs are contiguous, any distance apart and a multiple of 16 long: gate or up of
            a product with interleaved rows (:mod:`fastinfer.ops.gemm`).
        x: [tokens, in], dtype of ``y``; rows may be strided.
        a: [slots, max_rank, in]; fp32, bf16 or fp16; contiguous. PEFT's ``lora_A.weight``.
        b: [slots, max_rank, out], dtype of ``a``; contiguous. PEFT's ``lora_B.weight`` transposed, times the adapter's
            scale.
        adapter_ids: [tokens] int32; the token's slot, or -1: its row of ``y`` is left alone.
        ranks: [slots] int32 in 0..max_rank: of ``a`` and ``b`` only so many rows of a slot are read. ``None``: all.
        norm_weight: [in]; fp32 or the dtype of ``x``: ``rms_norm`` of ``x`` comes first, as in the linear layers.
        eps: of that norm.

    Raises:
        RuntimeError: shapes, dtypes and strides; on the CPU also an id or a rank out of range. On a GPU such an id is
            none, and such a rank the nearest in range.

    Devices: CPU, CUDA (not yet run on a GPU).

    Source: LoRA: Hu et al., 2021, https://arxiv.org/abs/2106.09685; many adapters in one batch: Punica, Chen et al.,
    2023, https://arxiv.org/abs/2310.18547.

    >>> import torch, fastinfer.ops as ops
    >>> x, y = torch.randn(3, 32), torch.zeros(3, 48)
    >>> a, b = torch.randn(2, 8, 32), torch.randn(2, 8, 48)  # two adapters of rank 8
    >>> ops.add_lora(y, x, a, b, torch.tensor([1, -1, 0], dtype=torch.int32))
    >>> expected = [x[0] @ a[1].T @ b[1], torch.zeros(48), x[2] @ a[0].T @ b[0]]
    >>> torch.allclose(y, torch.stack(expected), atol=1e-3)
    True
    """
    inference_only("add_lora", "y x", y, x)
    ops.add_lora.default(y, x, a, b, adapter_ids, ranks, norm_weight, eps)
