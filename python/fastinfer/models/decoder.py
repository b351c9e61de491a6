"""A decoder-only transformer on the fused operators.

One layer is six kernel calls: norm + QKV, rotary + cache store, attention, output + residual; norm + gate/up +
activation, down + residual. Nothing is computed outside the operators, so that a step can be recorded as a graph.
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
    """One layer; each half reads the residual stream and returns it with its own share added."""

    attention: Attention
    mlp: MLP


@dataclass(frozen=True, eq=False)
class Decoder:
    """A loaded model.

    Attributes:
        config: its sizes.
        dtype: of the hidden states.
        embedding: [vocab, hidden].
        layers: in order.
        norm: the last one.
        lm_head: [vocab, hidden]; the embedding itself where the two are tied.
        position_embedding: [max_position, hidden], of models with learned positions.
        adapters: LoRA adapters, of which a batch's ``adapter_ids`` name the slots.
    """

    config: ModelConfig
    dtype: torch.dtype
    embedding: Weight
    layers: tuple[DecoderLayer, ...]
    norm: Norm
    lm_head: Weight
    position_embedding: Tensor | None = None
    adapters: AdapterSlots | None = None

    @torch.inference_mode()
    def forward(self, batch: Batch, kv_cache: KVCache) -> Tensor:
        """Compute a step, filling the cache.

        Returns:
            [tokens, hidden] of the last layer, before the last norm.
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
    def logits(self, hidden: Tensor, indices: Tensor) -> Tensor:
        """Logits [n, vocab], in the model's ``dtype``, of rows [n] int64 of what :meth:`forward` returned."""
        x, options = self.norm.before_linear(ops.embedding(hidden, indices))
        logits = self.lm_head.linear(x, **options)
        if self.config.logits_softcap:
            ops.softcap(logits, self.config.logits_softcap)
        return logits

    @torch.inference_mode()
    def normalize(self, hidden: Tensor) -> Tensor:
        """The last norm of rows of what :meth:`forward` returned: what the logits are made from."""
        return self.norm(hidden)

    def with_adapters(self, slots: AdapterSlots) -> "Decoder":
        """The same weights, computing a batch's ``adapter_ids`` with the adapters in these slots."""
        return replace(self, adapters=slots)

    def _adapters(self, batch: Batch) -> Sequence[LayerAdapters | None]:
        if batch.adapter_ids is None:
            return [None] * len(self.layers)
        if self.adapters is None:
            raise ValueError("adapter_ids must be None for a model without adapters")
        return self.adapters.of(batch.adapter_ids)
