"""A decoder-only transformer with RMSNorm, rotary grouped-query attention and a gated MLP, on the fused operators.

One layer is six kernel calls: norm + QKV, rotary + cache store, attention, output + residual; norm + gate/up +
activation, down + residual. Nothing is computed outside the operators, so that a step can be recorded as a graph.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fastinfer import ops
from fastinfer.engine.batch import Batch
from fastinfer.engine.kv_tensors import KVCacheTensors, LayerCache
from fastinfer.formats.weight import Weight
from fastinfer.models.config import ModelConfig


@dataclass(frozen=True, eq=False)
class DecoderLayer:
    """One layer's weights: ``qkv`` is Q, K and V rows below each other; ``gate_up`` is interleaved in runs of 16."""

    attention_norm: Tensor
    qkv: Weight
    output: Weight
    mlp_norm: Tensor
    gate_up: Weight
    down: Weight


@dataclass(frozen=True, eq=False)
class Decoder:
    """A loaded model.

    Attributes:
        config: its sizes.
        dtype: of the hidden states.
        embedding: [vocab, hidden].
        layers: in order.
        norm: weight of the last RMSNorm.
        lm_head: [vocab, hidden]; the embedding itself where the two are tied.
        cos_sin_cache: [max_position, rotary_dim] fp32.
    """

    config: ModelConfig
    dtype: torch.dtype
    embedding: Weight
    layers: tuple[DecoderLayer, ...]
    norm: Tensor
    lm_head: Weight
    cos_sin_cache: Tensor

    @torch.inference_mode()
    def forward(self, batch: Batch, kv_cache: KVCacheTensors) -> Tensor:
        """Compute a step, filling the cache.

        Returns:
            [tokens, hidden] of the last layer, before the last norm.
        """
        x = self.embedding.rows(batch.token_ids, self.dtype)
        for layer, cache in zip(self.layers, kv_cache, strict=True):
            x = self._attention(layer, x, batch, cache)
            x = self._mlp(layer, x)
        return x

    @torch.inference_mode()
    def logits(self, hidden: Tensor, indices: Tensor) -> Tensor:
        """Logits [n, vocab], in the model's ``dtype``, of rows [n] int64 of what :meth:`forward` returned."""
        x = ops.embedding(hidden, indices)
        return self.lm_head.linear(x, norm_weight=self.norm, eps=self.config.rms_norm_eps)

    @torch.inference_mode()
    def normalize(self, hidden: Tensor) -> Tensor:
        """The last norm of rows of what :meth:`forward` returned: what the logits are made from."""
        return ops.rms_norm(hidden, self.norm, self.config.rms_norm_eps)

    def _attention(self, layer: DecoderLayer, x: Tensor, batch: Batch, cache: LayerCache) -> Tensor:
        config = self.config
        sizes = [heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
        qkv = layer.qkv.split_linear(x, sizes, norm_weight=layer.attention_norm, eps=config.rms_norm_eps)
        q, k, v = (part.view(len(x), -1, config.head_dim) for part in qkv)
        rotary = None, None, 0.0, batch.positions, self.cos_sin_cache, False
        ops.norm_rotary_store(q, k, v, *rotary, cache.k, cache.v, cache.k_scale, cache.v_scale, batch.slot_mapping)
        out = ops.paged_attention(
            q,
            cache.k,
            cache.v,
            batch.block_table,
            batch.seq_lens,
            batch.query_start,
            k_scale=cache.k_scale,
            v_scale=cache.v_scale,
        )
        return layer.output.linear(out.view(len(x), -1), residual=x)

    def _mlp(self, layer: DecoderLayer, x: Tensor) -> Tensor:
        hidden = layer.gate_up.linear(
            x, norm_weight=layer.mlp_norm, eps=self.config.rms_norm_eps, activation=self.config.activation
        )
        return layer.down.linear(hidden, residual=x)
