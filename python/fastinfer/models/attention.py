"""Attention of one layer: norm + QKV, rotary + cache store, attention, output + residual."""

from dataclasses import dataclass

from torch import Tensor

from fastinfer import ops
from fastinfer.models.batch import Batch
from fastinfer.models.kv_cache import LayerCache
from fastinfer.models.lora import LayerAdapters
from fastinfer.models.norm import Norm
from fastinfer.models.projection import OutputProjection
from fastinfer.weights.weight import Weight


@dataclass(frozen=True, eq=False)
class Attention:
    """Grouped-query attention over a paged cache.

    Attributes:
        num_heads, num_kv_heads: number of query heads, and of key and value heads.
        head_dim: number of elements of a head.
        norm: norm of the input.
        qkv: projections of queries, keys and values, with their rows concatenated.
        output: projection back to the residual stream.
        cos_sin_cache: [max_position, rotary_dim] fp32.
        q_norm, k_norm: [head_dim], RMSNorm weights for each head of queries and keys, or ``None``.
        head_norm_eps: ``eps`` of these norms.
        window: length of the sliding window in positions, 0 for none.
        softcap, scale: cap and factor of the logits, see :func:`fastinfer.ops.paged_attention`.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm: Norm
    qkv: Weight
    output: OutputProjection
    cos_sin_cache: Tensor
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    head_norm_eps: float = 0.0
    window: int = 0
    softcap: float = 0.0
    scale: float | None = None

    def plan(self, batch: Batch) -> Tensor:
        """Plan how the attention of a step is divided on a GPU; layers with the same window share the plan."""
        sizes = self.num_heads, self.num_kv_heads, self.head_dim
        return ops.paged_attention_plan(batch.seq_lens, batch.query_start, *sizes, self.window)

    def __call__(
        self, residual: Tensor, batch: Batch, cache: LayerCache, plan: Tensor, lora: LayerAdapters | None
    ) -> Tensor:
        x, options = self.norm.before_linear(residual)
        sizes = [heads * self.head_dim for heads in (self.num_heads, self.num_kv_heads, self.num_kv_heads)]
        qkv = self.qkv.split_linear(x, sizes, **options)
        if lora is not None:
            for name, part in zip(("q_proj", "k_proj", "v_proj"), qkv, strict=True):
                lora.add(name, part, x, **options)
        q, k, v = (part.view(len(x), -1, self.head_dim) for part in qkv)
        rotary = batch.positions, self.cos_sin_cache, False
        ops.norm_rotary_store(
            q,
            k,
            v,
            self.q_norm,
            self.k_norm,
            self.head_norm_eps,
            *rotary,
            cache.k,
            cache.v,
            cache.k_scale,
            cache.v_scale,
            batch.slot_mappings[cache.group],
        )
        out = ops.paged_attention(
            q,
            cache.k,
            cache.v,
            batch.block_tables[cache.group],
            batch.seq_lens,
            batch.query_start,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
            k_scale=cache.k_scale,
            v_scale=cache.v_scale,
            plan=plan,
        )
        return self.output(out.view(len(x), -1), residual, lora)
