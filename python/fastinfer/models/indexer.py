"""The indexer of a layer with latent attention: which cached tokens each token reads."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from fastinfer import ops
from fastinfer.models.batch import Batch
from fastinfer.models.config import IndexerConfig
from fastinfer.models.kv_cache import LayerCache
from fastinfer.models.norm import LayerNorm
from fastinfer.weights.weight import NormOptions, Weight


class ChosenTokens(NamedTuple):
    """Results of :func:`fastinfer.ops.select_tokens`.

    Attributes:
        slots: [tokens, width] int32; slots in the cache.
        lens: [tokens] int32; number of them.
    """

    slots: Tensor
    lens: Tensor


@dataclass(frozen=True, eq=False)
class Indexer:
    """Lightning indexer of DeepSeek-V3.2: few small heads whose keys are cached, one for each token.

    The keys lie in the cache beside the latents, under the same slots. A key follows from the tokens up to its own, so
    prefixes, forks and copies of blocks work as they do for latents.

    Source: DeepSeek-V3.2, https://arxiv.org/abs/2512.02556, section 2.1; ``DeepseekV32Indexer`` of transformers. The
    Hadamard transform of queries and keys, which changes no product, and the rounding to fp8 are left out.

    Attributes:
        sizes: sizes of the indexer.
        down: projections of the layer's input to the token's key and to the weights of the heads.
        key_norm: norm of the keys.
        query: [num_heads * head_dim, query_rank], projection of the queries' latents.
        cos_sin_cache: [max_position, rotary_dim] fp32.
    """

    sizes: IndexerConfig
    down: Weight
    key_norm: LayerNorm
    query: Weight
    cos_sin_cache: Tensor

    def __call__(
        self,
        x: Tensor,
        options: NormOptions,
        latents: Tensor,
        latent_options: NormOptions,
        batch: Batch,
        cache: LayerCache,
    ) -> ChosenTokens | None:
        """Store the keys of a step and choose the tokens that each of its tokens reads.

        Args:
            x, options: input of the layer's projections, with its norm.
            latents, latent_options: the queries' latents, with their norm.
            batch, cache: the step, and the layer's cache.

        Returns:
            The tokens; ``None`` if no sequence can be longer than ``top_k``.
        """
        sizes, keys = self.sizes, cache.index_keys
        assert keys is not None
        table, slots = batch.block_tables[cache.group], batch.slot_mappings[cache.group]
        k, weights = self.down.split_linear(x, [sizes.head_dim, sizes.num_heads], **options)
        k = self.key_norm(k)[:, None]
        reads_all = table.shape[1] * keys.shape[1] <= sizes.top_k
        q = k[:, :0] if reads_all else self.query.linear(latents, **latent_options).view(len(k), -1, sizes.head_dim)
        ops.rotary_embedding(q, k, batch.positions, self.cos_sin_cache, sizes.interleaved_rope)
        ops.store_kv_cache(k, k, keys, keys, slots)
        if reads_all:
            return None
        return ChosenTokens(*ops.select_tokens(q, weights, keys, table, batch.seq_lens, batch.query_start, sizes.top_k))
