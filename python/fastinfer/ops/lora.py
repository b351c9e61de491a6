"""Low-rank adapters (LoRA), with different adapters in one batch."""

from torch import Tensor

from fastinfer.ops._library import inference_only, ops


def add_lora(
    y: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    adapter_ids: Tensor,
    *,
    expert_ids: Tensor | None = None,
    ranks: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
) -> None:
    """Add each token's adapter to the output of a linear layer, in place: ``y += (x @ a[id].T) @ b[id]``.

    Both products are summed in fp32, and only the final sum is rounded. A token's result is bitwise the same in any
    batch.

    Args:
        y: [rows, out]; fp32, bf16 or fp16; changed in place; rows may be strided. Or [rows, runs, run], for the
            gate or up half of a product with interleaved rows (:mod:`fastinfer.ops.gemm`): each run is contiguous, a
            multiple of 16 long, and rows and runs may be strided. There is one row per token, or one for each of a
            token's experts.
        x: [tokens, in], dtype of ``y``; rows may be strided. With ``expert_ids`` also [rows, in], for an input that
            each expert has for itself.
        a: [slots, max_rank, in]; fp32, bf16 or fp16; contiguous. PEFT's ``lora_A.weight``.
        b: [slots, max_rank, out], dtype of ``a``; contiguous. PEFT's ``lora_B.weight`` transposed, times the adapter's
            scale.
        adapter_ids: [tokens] int32; each token's slot. For -1 the token's rows of ``y`` are left unchanged.
        expert_ids: [tokens, top_k] int32, contiguous, for a mixture of experts (:mod:`fastinfer.ops.moe`): row
            ``token * top_k + i`` uses the matrices of expert ``expert_ids[token, i]``. Then ``a`` is [slots, experts,
            max_rank, in], ``b`` [slots, experts, max_rank, out] and ``ranks`` [slots, experts]. Or [1, top_k] for the
            same experts of all tokens, such as heads with matrices of their own.
        ranks: [slots] int32 in 0..max_rank; number of rows of ``a`` and ``b`` that a slot uses; ``None`` for all.
        norm_weight: [in]; fp32 or the dtype of ``x``; weight of an ``rms_norm`` of ``x`` before the product, as in the
            linear layers.
        eps: ``eps`` of that norm.

    Raises:
        RuntimeError: a shape, dtype, device or stride does not fit; on the CPU also an id or a rank out of range. A GPU
            treats an id out of range like -1, and a rank out of range like the nearest in range.

    Devices: CPU, CUDA.

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
    ops.add_lora.default(y, x, a, b, adapter_ids, expert_ids, ranks, norm_weight, eps)
