"""Attention of one layer: norm + QKV, rotary + cache store, attention, output + residual."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from fastinfer import ops
from fastinfer.models.batch import Batch
from fastinfer.models.image_attention import attend_to_later
from fastinfer.models.kv_cache import LayerCache
from fastinfer.models.lora import LayerAdapters
from fastinfer.models.norm import Norm, RMSNorm
from fastinfer.models.projection import OutputProjection
from fastinfer.weights.weight import Weight


@dataclass(frozen=True, eq=False)
class Attention:
    """Grouped-query attention over a paged cache.

    Attributes:
        num_heads, num_kv_heads: number of query heads, and of key and value heads.
        head_dim: number of elements of a head.
        norm: norm of the input.
        qkv: projections of queries, keys and values, and of the gate if there is one, with their rows concatenated;
            without keys and values in a layer that attends to those of an earlier one.
        output: projection back to the residual stream.
        cos_sin_cache: [max_position, rotary_dim] fp32.
        first_cos_sin_cache: the same table if queries and keys are rotated before the norms of their heads;
            ``cos_sin_cache`` then rotates by nothing. ``None`` otherwise.
        q_norm, k_norm: [head_dim] RMSNorm weights of the heads of queries and keys, or ``None``.
        has_kv: whether the layer has keys and values of its own; without, the cache has those of an earlier layer.
        joint_q_norm, joint_k_norm: norms of all heads of a token together, or ``None``.
        qk_norm_eps: ``eps`` of the norms of heads.
        v_norm: whether each head of the values is normalised, without a weight.
        tied_kv: whether the values are the keys, before norm and rotation; ``qkv`` then has no rows for them.
        query_scales: [max_position] fp32, factors of the queries at each position; ``None`` for none, as in all layers
            without keys and values of their own.
        interleaved: whether elements 2i and 2i + 1 of a head are rotated together.
        window: length of the sliding window in positions, 0 for none.
        chunked: whether the windows are chunks of the text, see :func:`fastinfer.ops.paged_attention`.
        gate_size: number of elements of a token's gate, by whose sigmoids the output is multiplied: num_heads *
            head_dim, num_heads if one is for a whole head, or 0 for none.
        softplus_gate: whether the softplus takes the place of the sigmoid.
        value_columns: [value_dim] int64, the numbers from 0 on, if values have fewer elements than keys: the first
            elements of each head of the output are kept. ``None`` for all.
        value_norm: factor of the values in the form of a norm, or ``None``.
        softcap, scale, sinks: cap, factor and sinks of the logits, see :func:`fastinfer.ops.paged_attention`.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm: Norm
    qkv: Weight
    output: OutputProjection
    cos_sin_cache: Tensor
    first_cos_sin_cache: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    has_kv: bool = True
    joint_q_norm: RMSNorm | None = None
    joint_k_norm: RMSNorm | None = None
    qk_norm_eps: float = 0.0
    v_norm: bool = False
    tied_kv: bool = False
    query_scales: Tensor | None = None
    interleaved: bool = False
    window: int = 0
    chunked: bool = False
    gate_size: int = 0
    softplus_gate: bool = False
    value_columns: Tensor | None = None
    value_norm: RMSNorm | None = None
    softcap: float = 0.0
    scale: float | None = None
    sinks: Tensor | None = None

    def plan(self, batch: Batch) -> Tensor:
        """Plan how the attention of a step is divided on a GPU; layers with the same :attr:`plan_sizes` share it."""
        return ops.paged_attention_plan(batch.lens(self.window), batch.query_start, *self.plan_sizes)

    @property
    def plan_sizes(self) -> tuple[int, int, int, int, bool]:
        """Everything of a layer on which the plan depends."""
        return self.num_heads, self.num_kv_heads, self.head_dim, self.window, self.chunked

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        batch: Batch,
        cache: LayerCache,
        plan: Tensor,
        lora: LayerAdapters | None,
    ) -> Tensor:
        """Return ``residual``, if there is one, plus the output for ``x``, both [tokens, hidden]; fill the cache."""
        x, options = self.norm.before_linear(x)
        sizes = [self.num_heads * self.head_dim]
        if self.has_kv:
            sizes += [self.num_kv_heads * self.head_dim] * (1 if self.tied_kv else 2)
        if self.gate_size:
            sizes.append(self.gate_size)
        qkv = list(self.qkv.split_linear(x, sizes, **options))
        gate = qkv.pop() if self.gate_size else None
        if lora is not None:
            for name, part in zip(("q_proj", "k_proj", "v_proj"), qkv, strict=False):
                lora.add(name, part, x, **options)
            if gate is not None:
                lora.add("output_gate", gate, x, **options)
        q = self._store(qkv, batch, cache) if self.has_kv else self._rotated(qkv[0], batch)
        spans = () if batch.images is None else batch.images.spans_of(self.window)
        lse = q.new_empty(q.shape[:2], dtype=torch.float32) if spans else None
        out = self._attend(q, batch, cache, plan, lse)
        if lse is not None:
            self._attend_to_later(q, qkv, batch, spans, out, lse)
        out = self._values(out).view(len(x), -1)
        if gate is not None:
            out = ops.softplus_gate(out, gate) if self.softplus_gate else ops.sigmoid_gate(out, gate)
        return self.output(out, residual, lora)

    def _attend(self, q: Tensor, batch: Batch, cache: LayerCache, plan: Tensor, lse: Tensor | None) -> Tensor:
        """Return the output of attention, [tokens, num_heads, head_dim]."""
        attend = partial(
            ops.paged_attention,
            scale=self.scale,
            window=self.window,
            chunked=self.chunked,
            softcap=self.softcap,
            sinks=self.sinks,
            k_scale=cache.k_scale,
            v_scale=cache.v_scale,
        )
        table, sparse = batch.block_tables[cache.group], batch.sparse
        # Layers without keys of their own may compute the last rows of prompts alone, so no tiles of theirs choose.
        tile_start = None if sparse is None or not self.has_kv else sparse.tile_start
        if sparse is None or cache.key_codes is None or not (sparse.num_generated or tile_start is not None):
            lens = batch.lens(self.window)
            return attend(q, cache.k, cache.v, table, lens, batch.query_start, lse=lse, plan=plan)
        select = partial(
            ops.select_pages,
            codes=cache.key_codes,
            block_table=table,
            seq_lens=batch.seq_lens,
            query_start=batch.query_start,
            block_size=cache.k.shape[1],
            share=sparse.share,
            num_dense_pages=sparse.num_dense_pages,
            scale=self.scale,
        )
        if tile_start is not None:
            pages, lens = select(q, row_start=tile_start)
            out = attend(q, cache.k, cache.v, pages, lens, tile_start, lse=lse)
            if cache.value_codes is None:  # as rows of their own, generated tokens have attended to their pages
                return out
        elif sparse.dense_lens is None:
            out = q.new_empty(q.shape)
        else:  # of tokens that see nothing, as the others do here, it is 0
            out = attend(q, cache.k, cache.v, table, sparse.dense_lens, batch.query_start, lse=lse)
        rows, own = q[: sparse.num_generated], out[: sparse.num_generated]
        # Heads of other layers choose other pages, and so have other lengths.
        if cache.value_codes is None:
            pages, lens = select(rows)
            attend(rows, cache.k, cache.v, pages, lens, sparse.row_start, out=own)
        elif len(rows):
            rest = rows.new_empty(rows.shape)
            own_lse, rest_lse = (rows.new_empty(rows.shape[:2], dtype=torch.float32) for _ in range(2))
            pages, lens = select(rows, value_codes=cache.value_codes, rest=rest, rest_lse=rest_lse)
            attend(rows, cache.k, cache.v, pages, lens, sparse.row_start, out=own, lse=own_lse)
            ops.merge_attention_states(own, own_lse, rest, rest_lse, inplace=True)
        return out

    def _values(self, out: Tensor) -> Tensor:
        """Return the elements of the output that belong to values, times the values' factor."""
        heads = out.view(-1, self.head_dim)
        if self.value_columns is not None:
            # Norms and products read contiguous rows, and of the recorded operators this one copies columns.
            heads = ops.permute_columns(heads[:, : len(self.value_columns)], self.value_columns)
        return heads if self.value_norm is None else self.value_norm(heads)

    def _store(self, qkv: list[Tensor], batch: Batch, cache: LayerCache) -> Tensor:
        """Store keys and values in the cache, and return the queries, normalised and rotated."""
        if self.tied_kv:
            qkv = [*qkv, qkv[1]]
        if self.joint_q_norm is not None:
            assert self.joint_k_norm is not None
            qkv = [self.joint_q_norm(qkv[0]), self.joint_k_norm(qkv[1]), qkv[2]]
        q, k, v = (part.view(len(part), -1, self.head_dim) for part in qkv)
        if self.first_cos_sin_cache is not None:
            ops.rotary_embedding(q, k, *batch.rotation(self.first_cos_sin_cache), self.interleaved)
        ops.norm_rotary_store(
            q,
            k,
            v,
            self.q_norm,
            self.k_norm,
            self.qk_norm_eps,
            *batch.rotation(self.cos_sin_cache),
            self.interleaved,
            cache.k,
            cache.v,
            cache.k_scale,
            cache.v_scale,
            batch.slot_mappings[cache.group],
            self.v_norm,
            self.query_scales,
        )
        if cache.key_codes is not None:
            ops.store_key_codes(cache.key_codes, cache.k, cache.k_scale, batch.slot_mappings[cache.group])
        if cache.value_codes is not None:
            ops.store_value_codes(cache.value_codes, cache.v, cache.v_scale, batch.slot_mappings[cache.group])
        return q

    def _attend_to_later(
        self, q: Tensor, qkv: list[Tensor], batch: Batch, spans: tuple[slice, ...], out: Tensor, lse: Tensor
    ) -> None:
        """Let the tokens of images see those behind them, in layers with keys and values of their own."""
        k, v = (part.view(len(part), -1, self.head_dim) for part in qkv[1:])
        keys = k.clone() if self.k_norm is None else ops.rms_norm(k.contiguous(), self.k_norm, self.qk_norm_eps)
        ops.rotary_embedding(keys, keys[:, :0], *batch.rotation(self.cos_sin_cache), self.interleaved)
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        if self.v_norm:
            v = functional.rms_norm(v.float(), (self.head_dim,), eps=self.qk_norm_eps).to(v.dtype)
        attend_to_later(q, keys, v, out, lse, spans, scale)

    def _rotated(self, q: Tensor, batch: Batch) -> Tensor:
        """Return queries normalised and rotated, for keys and values that an earlier layer has stored."""
        if self.joint_q_norm is not None:
            q = self.joint_q_norm(q)
        heads = q.view(len(q), -1, self.head_dim)
        if self.q_norm is not None:
            heads = ops.rms_norm(heads, self.q_norm, self.qk_norm_eps)
        ops.rotary_embedding(heads, heads[:, :0], *batch.rotation(self.cos_sin_cache), self.interleaved)
        return heads
