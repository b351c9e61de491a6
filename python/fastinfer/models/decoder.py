"""Decoder-only transformer, built from fused operators.

A layer takes six kernel calls: norm + QKV, rotary + cache store, attention, output + residual; norm + gate/up +
activation, down + residual. Only operators compute, so a step can be recorded as a graph.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fastinfer import ops
from fastinfer.models.attention import Attention
from fastinfer.models.batch import Batch
from fastinfer.models.config import ModelConfig
from fastinfer.models.kv_cache import KVCache
from fastinfer.models.lora import AdapterSlots, LayerAdapters
from fastinfer.models.mlp import MLP
from fastinfer.models.norm import Norm
from fastinfer.weights.weight import Weight


@dataclass(frozen=True, eq=False)
class DecoderLayer:
    """One layer; attention and MLP each read the residual stream and return it with their output added."""

    attention: Attention
    mlp: MLP


@dataclass(frozen=True, eq=False)
class Decoder:
    """A loaded model.

    Attributes:
        config: sizes and constants of the model.
        dtype: dtype of the hidden states.
        embedding: [vocab, hidden].
        layers: all layers in order.
        norm: norm after the last layer.
        lm_head: [vocab, hidden]; the embedding itself if the two are tied. [draft_vocab, hidden] with ``draft_tokens``.
        position_embedding: [max_position, hidden], or ``None`` for models without learned positions.
        adapters: slots of LoRA adapters, which a batch's ``adapter_ids`` refer to, or ``None``.
        draft_tokens: [draft_vocab] int64, the token of each column of the logits; ``None`` if column i is token i. Only
            draft models have one.
    """

    config: ModelConfig
    dtype: torch.dtype
    embedding: Weight
    layers: tuple[DecoderLayer, ...]
    norm: Norm
    lm_head: Weight
    position_embedding: Tensor | None = None
    adapters: AdapterSlots | None = None
    draft_tokens: Tensor | None = None

    @torch.inference_mode()
    def forward(self, batch: Batch, kv_cache: KVCache) -> Tensor:
        """Compute a step and fill the cache.

        Returns:
            [tokens, hidden], output of the last layer before the last norm.
        """
        x = self.embedding.rows(batch.token_ids, self.dtype)
        if self.position_embedding is not None:
            x = ops.embedding(self.position_embedding, batch.positions, x)
        plans: dict[int, Tensor] = {}
        for layer, lora, cache in zip(self.layers, self._adapters(batch), kv_cache, strict=True):
            attention = layer.attention
            if attention.window not in plans:
                plans[attention.window] = attention.plan(batch)
            x = attention(x, batch, cache, plans[attention.window], lora)
            x = layer.mlp(x, lora)
        return x

    @torch.inference_mode()
    def logits(self, hidden: Tensor, indices: Tensor, adapter_ids: Tensor | None = None) -> Tensor:
        """Compute logits in ``dtype`` for rows of the result of :meth:`forward`.

        Args:
            hidden: [tokens, hidden], the result of :meth:`forward`.
            indices: [n] int64; the rows.
            adapter_ids: [n] int32; their LoRA adapters, -1 for none; ``None`` if none has an adapter.

        Returns:
            [n, vocab].
        """
        x, options = self.norm.before_linear(ops.embedding(hidden, indices))
        logits = self.lm_head.linear(x, **options)
        if adapter_ids is not None:
            self._slots().lm_head.add(logits, x, adapter_ids, **options)
        if self.config.logits_softcap:
            ops.softcap(logits, self.config.logits_softcap)
        return logits

    @torch.inference_mode()
    def normalize(self, hidden: Tensor) -> Tensor:
        """Apply the last norm to rows of the result of :meth:`forward`; the logits are computed from it."""
        return self.norm(hidden)

    def with_adapters(self, slots: AdapterSlots) -> "Decoder":
        """Return a model with the same weights that applies adapters from these slots, by a batch's ``adapter_ids``."""
        return replace(self, adapters=slots)

    def _adapters(self, batch: Batch) -> Sequence[LayerAdapters | None]:
        if batch.adapter_ids is None:
            return [None] * len(self.layers)
        return self._slots().of(batch.adapter_ids)

    def _slots(self) -> AdapterSlots:
        if self.adapters is None:
            raise ValueError("adapter_ids must be None for a model without adapters, got a tensor")
        return self.adapters
