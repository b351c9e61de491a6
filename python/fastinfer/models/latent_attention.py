"""Multi-head latent attention of one layer: projections, join + rotary + cache store, attention, output + residual."""

from dataclasses import dataclass

from torch import Tensor

from fastinfer import ops
from fastinfer.models.batch import Batch
from fastinfer.models.config import LatentAttentionConfig
from fastinfer.models.indexer import ChosenTokens, Indexer
from fastinfer.models.kv_cache import LayerCache
from fastinfer.models.lora import LayerAdapters
from fastinfer.models.norm import Norm, RMSNorm
from fastinfer.models.projection import OutputProjection
from fastinfer.weights.expert_weights import ExpertWeights
from fastinfer.weights.weight import Weight


@dataclass(slots=True, eq=False)
class LatentPlan:
    """Plan of a step, which all layers share.

    Attributes:
        attention: how the attention is divided on a GPU, see :func:`fastinfer.ops.paged_attention_plan`.
        rows: rows of each head in products with a matrix per head.
        chosen: the tokens that the last indexer has chosen; ``None`` if all are read.
        sparse: like ``attention``, for chosen tokens, as many in all layers; ``None`` before the first choice.
    """

    attention: Tensor
    rows: ops.HeadRows
    chosen: ChosenTokens | None = None
    sparse: Tensor | None = None


@dataclass(frozen=True, eq=False)
class LatentAttention:
    """Attention whose keys and values are products of a latent of each token, as in DeepSeek-V2 and V3.

    A token has one latent c and one rotated key r for all heads, which are cached. Head h has the key (K_h c, r) and
    the value V_h c. They are never computed: with the query (q, s) a logit is q K_h c + s r, so K_h is applied to the
    queries, attention reads the cached rows as keys and values of a single head, and V_h is applied to its result.

    The output may be multiplied by the sigmoid of a number for each head, as in Bailing hybrid.

    With an indexer each token reads the tokens that this has chosen, or the last layer before that has one.

    Source: DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1; ``DeepseekV3Attention`` of transformers.

    Attributes:
        num_heads: number of query heads.
        sizes: sizes of the layer.
        norm: norm of the input.
        down: projections of the input to the queries' latents, or to the queries, to the row that is cached, and to
            the gates of the output's heads, with their rows concatenated.
        query_norm: norm of the queries' latents, or ``None``.
        query: [num_heads * query_dim, query_rank], or ``None`` if queries have no latents.
        latent_norm: norm of the latents of keys and values.
        keys: [num_heads, rank, plain_dim], the transposed K of each head.
        values: [num_heads, value_dim, rank], the V of each head.
        output: projection back to the residual stream.
        cos_sin_cache: [max_position, rotary_dim] fp32.
        interleaved: whether elements 2i and 2i + 1 are rotated together.
        head_ids: [1, num_heads] int32, the heads, which have matrices of their own in adapters.
        query_scales: [max_position] fp32, factors of the queries at each position, or ``None``.
        scale: factor of the logits.
        gated: whether the heads of the output have gates.
        indexer: chooses the tokens that this layer reads, and those after it that have none; ``None`` for none.
    """

    num_heads: int
    sizes: LatentAttentionConfig
    norm: Norm
    down: Weight
    query_norm: RMSNorm | None
    query: Weight | None
    latent_norm: RMSNorm
    keys: ExpertWeights
    values: ExpertWeights
    output: OutputProjection
    cos_sin_cache: Tensor
    interleaved: bool
    head_ids: Tensor
    query_scales: Tensor | None
    scale: float
    gated: bool = False
    indexer: Indexer | None = None

    @property
    def plan_sizes(self) -> tuple[int, int, int, int]:
        """Everything of a layer on which the plan depends."""
        return self.num_heads, 1, self.sizes.row_dim, 0

    def plan(self, batch: Batch) -> LatentPlan:
        """Plan a step for all layers."""
        attention = ops.paged_attention_plan(batch.seq_lens, batch.query_start, *self.plan_sizes)
        return LatentPlan(attention, ops.head_rows(batch.positions, self.num_heads))

    def __call__(
        self, residual: Tensor, batch: Batch, cache: LayerCache, plan: LatentPlan, lora: LayerAdapters | None
    ) -> Tensor:
        sizes = self.sizes
        normed, norm_options = x, options = self.norm.before_linear(residual)
        first = sizes.query_rank or self.num_heads * sizes.query_dim
        gate_sizes = [self.num_heads] if self.gated else []
        q, kv, *gates = self.down.split_linear(x, [first, sizes.row_dim, *gate_sizes], **options)
        if lora is not None:
            lora.add("q_proj" if self.query is None else "q_a_proj", q, x, **options)
            lora.add("kv_a_proj", kv, x, **options)
            for gate in gates:
                lora.add("output_gate", gate, x, **options)
        if self.query is not None:
            assert self.query_norm is not None
            x, options = self.query_norm.before_linear(q)
            if self.indexer is not None:
                plan.chosen = self.indexer(normed, norm_options, x, options, batch, cache)
            q = self.query.linear(x, **options)
            if lora is not None:
                lora.add("q_b_proj", q, x, **options)
        heads = q.unflatten(1, (self.num_heads, sizes.query_dim))
        plain = heads.flatten(0, 1)[:, : sizes.plain_dim]
        with ops.prompt_rows_of_experts(self.num_heads):
            latent = self.keys.linear(plain, plan.rows)
        if lora is not None:
            lora.add("heads.keys", latent, plain, self.head_ids)
        q = ops.latent_rotary_store(
            latent.unflatten(0, heads.shape[:2]),
            heads[..., sizes.plain_dim :],
            kv,
            self.latent_norm.weight,
            self.latent_norm.eps,
            batch.positions,
            self.cos_sin_cache,
            self.interleaved,
            self.query_scales,
            cache.k,
            cache.k_scale,
            batch.slot_mappings[cache.group],
        )
        out = self._attend(q, batch, cache, plan)
        with ops.prompt_rows_of_experts(self.num_heads):
            values = self.values.linear(out.flatten(0, 1), plan.rows)
        if lora is not None:
            lora.add("heads.values", values, out.flatten(0, 1), self.head_ids)
        out = values.view(len(residual), -1)
        for gate in gates:
            out = ops.sigmoid_gate(out, gate)
        return self.output(out, residual, lora)

    def _attend(self, q: Tensor, batch: Batch, cache: LayerCache, plan: LatentPlan) -> Tensor:
        """Return the output of attention in the latents, [tokens, num_heads, rank]."""
        if plan.chosen is None:
            return ops.paged_attention(
                q,
                cache.k,
                cache.v,
                batch.block_tables[cache.group],
                batch.seq_lens,
                batch.query_start,
                scale=self.scale,
                k_scale=cache.k_scale,
                v_scale=cache.v_scale,
                plan=plan.attention,
            )
        assert batch.row_start is not None
        # Each token is a sequence of its own, with blocks of a single slot.
        if plan.sparse is None:
            plan.sparse = ops.paged_attention_plan(plan.chosen.lens, batch.row_start, *self.plan_sizes)
        k, v = (rows.flatten(0, 1)[:, None] for rows in (cache.k, cache.v))
        scales = None if cache.k_scale is None else cache.k_scale.flatten(0, 1)[:, None]
        return ops.paged_attention(
            q,
            k,
            v,
            *plan.chosen,
            batch.row_start,
            scale=self.scale,
            k_scale=scales,
            v_scale=scales,
            plan=plan.sparse,
        )
