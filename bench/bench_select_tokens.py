"""Latent attention to tokens that an indexer chooses, beside attention to all; sizes of DeepSeek-V3.2.

Generated tokens after a context, in one layer, without the projections of the indexer; on a GPU also a chunk of a
prompt.
"""

import torch
from harness import Cases, Setting, Timing, compare, main
from torch import Tensor

from fastinfer import ops

HEADS, RANK, ROW, INDEX_HEADS, INDEX_DIM, TOP_K, BLOCK_SIZE = 128, 512, 576, 64, 128, 2048, 16
CONTEXTS = [4096, 16384, 65536]
# (sequences, tokens of each, context).
GPU_CASES = [(1, 1, 4096), (1, 1, 16384), (1, 1, 131072), (64, 1, 16384), (1, 512, 4096), (1, 512, 65536)]


def run_cpu(setting: Setting) -> Cases:
    cases = setting.cases
    for context in CONTEXTS:
        timings = measure(setting, 1, 1, context, torch.float32, torch.float16)
        cases[f"{context} tokens before"] = timings
    return cases


def run_cuda(setting: Setting) -> Cases:
    cases = setting.cases
    for seqs, queries, context in GPU_CASES:
        sizes = setting.size(seqs, 2), setting.size(queries, min(queries, 3)), setting.size(context, 96)
        timings = measure(setting, *sizes, torch.bfloat16, torch.bfloat16)
        cases[f"{seqs} x {queries} at the end of {context}"] = timings
    return cases


def measure(
    setting: Setting, seqs: int, queries: int, context: int, dtype: torch.dtype, cache_dtype: torch.dtype
) -> list[Timing]:
    device, tokens, blocks = setting.device, seqs * queries, seqs * context // BLOCK_SIZE
    top_k = setting.size(TOP_K, 40)
    rows, keys = (
        torch.randn(blocks, BLOCK_SIZE, 1, size, dtype=cache_dtype, device=device) for size in (ROW, INDEX_DIM)
    )
    q, index_q, weights = (
        torch.randn(tokens, *shape, dtype=dtype, device=device)
        for shape in ((HEADS, ROW), (INDEX_HEADS, INDEX_DIM), (INDEX_HEADS,))
    )
    table = torch.randperm(blocks, device=device).int().view(seqs, -1)
    lens = torch.full((seqs,), context, dtype=torch.int32, device=device)
    starts = torch.arange(0, tokens + 1, queries, dtype=torch.int32, device=device)
    row_starts = torch.arange(tokens + 1, dtype=torch.int32, device=device)

    def dense(q: Tensor) -> Tensor:
        return ops.paged_attention(q, rows, rows[..., :RANK], table, lens, starts)

    def choice(_: Tensor) -> tuple[Tensor, Tensor]:
        return ops.select_tokens(index_q, weights, keys, table, lens, starts, top_k)

    def sparse(q: Tensor) -> Tensor:
        slots = rows.flatten(0, 1)[:, None]
        return ops.paged_attention(q, slots, slots[..., :RANK], *choice(q), row_starts)

    def torch_choice(_: Tensor) -> Tensor:
        own = keys[table.long()].flatten(1, 3).to(dtype)
        scores = weights[:, None] @ (index_q @ own.mT).relu()
        return scores.topk(top_k).indices

    candidates = {"attention to all": dense, f"choice and attention to {top_k}": sparse, "choice alone": choice}
    if queries == 1:  # the others see different numbers of tokens
        candidates["choice alone, torch"] = torch_choice
    return compare(candidates, [(q,)], repeats=setting.repeats)


if __name__ == "__main__":
    main("select_tokens", cpu=run_cpu, cuda=run_cuda)
