"""Batches for paged attention, in memory that shows every access out of place.

Tolerance: the error may be at most twice that of the naive attention in the dtype of q, plus fp32's own noise.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fastinfer import ops
from support import reference
from support.helpers import assert_bitwise

QUANTIZED = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}

# (queries, cached length) of each sequence. The CPU kernel cuts the cache in tiles of 64 positions and splits of 512,
# and reads it in place for up to 8 rows (queries times heads of a KV head), else through a copy in fp32. The CUDA
# kernel cuts it in tiles of 32 or 64, has rows of up to 16 and up to 64, and cuts a batch into as many parts as the GPU
# has room for blocks: 12 on the emulator.
BATCHES = {
    "decode": [(1, 1), (1, 2), (1, 17), (1, 511), (1, 512), (1, 513), (1, 1500)],
    "prefill": [(1, 1), (5, 5), (17, 17), (70, 70)],
    "chunk": [(7, 40), (33, 600), (2, 514)],
    "mixed": [(1, 100), (0, 50), (19, 19), (3, 1025), (0, 0), (1, 33)],
}
ABSURD = torch.tensor([2**30, -7], dtype=torch.int32)


@dataclass
class Batch:
    """Arguments of paged_attention. Memory that must not be read is NaN; table entries that must not be, absurd."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    query_start: Tensor

    def run(self, **options: Any) -> Tensor:
        return ops.paged_attention(**vars(self), **options)

    def expected(self, **options: Any) -> tuple[Tensor, Tensor]:
        return reference.paged_attention(**vars(self), **options)


def make_batch(
    lengths: list[tuple[int, int]],
    q_heads: int = 9,
    kv_heads: int = 3,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    device: str = "cpu",
) -> Batch:
    blocks_of = [-(-length // block_size) for _, length in lengths]
    pages = (sum(blocks_of) + 5, block_size, kv_heads, head_dim)
    k_cache, v_cache = torch.full((2, *pages), torch.nan, device=device).to(cache_dtype or dtype)
    order = torch.randperm(pages[0]).int()
    table = ABSURD.repeat(len(lengths), max(blocks_of, default=0) // 2 + 2)
    for sequence, (_, length) in enumerate(lengths):
        own, order = order[: blocks_of[sequence]], order[blocks_of[sequence] :]
        table[sequence, : len(own)] = own
        for cache in (k_cache, v_cache):
            slots = torch.full((len(own) * block_size, kv_heads, head_dim), torch.nan)
            slots[:length] = torch.randn(length, kv_heads, head_dim)
            cache[own.long()] = slots.view(-1, *pages[1:]).to(cache)
    starts = torch.tensor([0] + [count for count, _ in lengths]).cumsum(0).int()
    q = torch.randn(int(starts[-1]), q_heads, head_dim, device=device).to(dtype)
    seq_lens = torch.tensor([length for _, length in lengths], dtype=torch.int32)
    return Batch(q, k_cache, v_cache, table.to(device), seq_lens.to(device), starts.to(device))


def assert_attention(batch: Batch, **options: Any) -> None:
    lse = torch.full(batch.q.shape[:2], torch.nan, device=batch.q.device)
    out = batch.run(lse=lse, **options)
    assert out.dtype == batch.q.dtype
    exact, exact_lse = batch.expected(**options)
    naive, _ = batch.expected(**options, compute_dtype=batch.q.dtype)
    # Row by row, so that a long row's noise does not excuse a short one's error; but for a row where the naive one is
    # lucky, its mean counts, or a unit in the last place of the row's largest result.
    errors, allowed = ((o.double() - exact).abs().flatten(1).amax(1) for o in (out, naive))
    last_places = torch.finfo(out.dtype).eps * exact.abs().flatten(1).amax(1)
    for row, error in enumerate(errors):
        limit = torch.maximum(2 * torch.maximum(allowed[row], allowed.mean()), last_places[row]) + 2e-6
        assert error <= limit, f"row {row}: error {error:.3g}, twice the naive one's is {limit:.3g}"
    torch.testing.assert_close(lse.double(), exact_lse, rtol=2e-6, atol=1e-5)
    assert_bitwise(batch.run(**options), out)


def with_values_in_keys(batch: Batch, value_dim: int) -> Batch:
    """The batch of latent attention: each key's first elements are its value."""
    return replace(batch, v_cache=batch.k_cache[..., :value_dim])


@dataclass
class QuantizedBatch(Batch):
    k_scale: Tensor
    v_scale: Tensor

    def expected(self, **options: Any) -> tuple[Tensor, Tensor]:
        """As of a cache of what the quantized one is worth."""
        pages = ((self.k_cache, self.k_scale), (self.v_cache, self.v_scale))
        caches = (cache.float() * scale[..., None] for cache, scale in pages)
        ragged = (self.block_table, self.seq_lens, self.query_start)
        return reference.paged_attention(self.q, *caches, *ragged, **options)


def quantized(batch: Batch, cache_dtype: torch.dtype) -> QuantizedBatch:
    """One scale per position and head. Positions that must not be read are NaN still; int8's by their scale."""
    caches = []
    for cache in (batch.k_cache, batch.v_cache):
        scale = cache.float().abs().amax(-1) / QUANTIZED[cache_dtype]
        scaled = cache / scale[..., None]
        caches.append((scaled.round().nan_to_num(99) if cache_dtype == torch.int8 else scaled).to(cache_dtype))
        caches.append(scale)
    k_cache, k_scale, v_cache, v_scale = caches
    if batch.v_cache.shape[3] < batch.k_cache.shape[3]:
        v_cache, v_scale = k_cache[..., : batch.v_cache.shape[3]], k_scale
    ragged = (batch.block_table, batch.seq_lens, batch.query_start)
    return QuantizedBatch(batch.q, k_cache, v_cache, *ragged, k_scale, v_scale)
