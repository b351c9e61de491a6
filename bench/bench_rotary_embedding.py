"""Rotary embedding and the store into the KV cache on a GPU, as separate operators and fused."""

import torch
from harness import Cases, Setting, cold_inputs, compare, main

from fastinfer import ops

Q_HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
TOKENS = [1, 64, 8192]


def run(setting: Setting) -> Cases:
    table = ops.cos_sin_cache(HEAD_DIM, 16384).to(setting.device)
    cases = setting.cases
    for count in TOKENS:
        tokens = setting.size(count, 2)
        slots = torch.randperm(2 * tokens, device=setting.device)[:tokens]
        positions = torch.randint(0, 16384, (tokens,), device=setting.device)
        blocks = -(-2 * tokens // BLOCK_SIZE)

        def make(tokens: int = tokens, blocks: int = blocks) -> tuple[torch.Tensor, ...]:
            """Create the output of a QKV projection, and the caches."""
            qkv = torch.randn(tokens, Q_HEADS + 2 * KV_HEADS, HEAD_DIM, device=setting.device).bfloat16()
            shape = (blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
            return qkv, *(torch.zeros(shape, device=setting.device).bfloat16() for _ in "kv")

        def separate(qkv, k_cache, v_cache, positions=positions, slots=slots):  # type: ignore[no-untyped-def]
            q, k, v = qkv.split([Q_HEADS, KV_HEADS, KV_HEADS], dim=1)
            ops.rotary_embedding(q, k, positions, table)
            ops.store_kv_cache(k, v, k_cache, v_cache, slots)

        def fused(qkv, k_cache, v_cache, positions=positions, slots=slots):  # type: ignore[no-untyped-def]
            q, k, v = qkv.split([Q_HEADS, KV_HEADS, KV_HEADS], dim=1)
            rotary = positions, table, False
            ops.norm_rotary_store(q, k, v, None, None, 1e-6, *rotary, k_cache, v_cache, None, None, slots)

        def torch_separate(qkv, k_cache, v_cache, positions=positions, slots=slots):  # type: ignore[no-untyped-def]
            q, k, v = qkv.split([Q_HEADS, KV_HEADS, KV_HEADS], dim=1)
            cos, sin = table[positions].bfloat16()[:, None].chunk(2, dim=-1)
            for x in (q, k):
                low, high = x.chunk(2, dim=-1)
                x.copy_(torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1))
            k_cache.view(-1, KV_HEADS, HEAD_DIM)[slots] = k
            v_cache.view(-1, KV_HEADS, HEAD_DIM)[slots] = v

        heads = 2 * Q_HEADS + 4 * KV_HEADS  # q, k and v are each read and written
        cases[f"{count} tokens"] = compare(
            {"fastinfer, fused": fused, "fastinfer, separate": separate, "torch": torch_separate},
            cold_inputs(make),
            repeats=setting.repeats,
            bytes_moved=2 * tokens * heads * HEAD_DIM,
        )
    return cases


if __name__ == "__main__":
    main("rotary_embedding", cuda=run)
