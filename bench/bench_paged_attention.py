"""Attention over a paged bf16 cache beside torch's SDPA on contiguous keys and values of the same dtype."""

import torch
from harness import Timing, compare, main

from fastinfer import ops

Q_HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 9, 3, 64, 32  # SmolLM2-135M
# (queries, context): decode at growing contexts, a chunk of prefill, a whole prompt.
CASES = [(1, 128), (1, 1024), (1, 8192), (64, 1024), (512, 512)]


def run(repeats: int) -> dict[str, list[Timing]]:
    cases = {}
    for queries, context in CASES:
        blocks = -(-context // BLOCK_SIZE)
        k_cache, v_cache = (torch.randn(blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM).bfloat16() for _ in "kv")
        q = torch.randn(queries, Q_HEADS, HEAD_DIM).bfloat16()
        paged = (
            q,
            k_cache,
            v_cache,
            torch.randperm(blocks, dtype=torch.int32)[None],
            torch.tensor([context], dtype=torch.int32),
            torch.tensor([0, queries], dtype=torch.int32),
        )
        k, v = (cache.view(-1, KV_HEADS, HEAD_DIM)[:context].transpose(0, 1)[None] for cache in (k_cache, v_cache))
        mask = torch.arange(context) <= torch.arange(context - queries, context)[:, None]

        def sdpa(q, *_, k=k, v=v, mask=mask):  # type: ignore[no-untyped-def]
            return torch.nn.functional.scaled_dot_product_attention(
                q.transpose(0, 1)[None], k, v, attn_mask=mask, enable_gqa=True
            )

        cases[f"queries={queries} context={context}"] = compare(
            {"fastinfer": ops.paged_attention, "torch SDPA": sdpa},
            [paged],
            repeats=repeats,
            bytes_moved=2 * k.nbytes,
        )
    return cases


if __name__ == "__main__":
    main("paged_attention", run)
