"""A decoder-only transformer with RMSNorm, rotary grouped-query attention and a gated MLP, on the fused operators.

One layer is six kernel calls: norm + QKV, rotary + cache store, attention, output + residual; norm + gate/up +
activation, down + residual. Nothing is computed outside the operators, so that a step can be recorded as a graph.

In a step with LoRA adapters every projection is followed by its low-rank part, and the activation by itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fastinfer import ops
from fastinfer.engine.batch import Batch
from fastinfer.engine.kv_tensors import KVCacheTensors, LayerCache
from fastinfer.formats.weight import Weight
from fastinfer.models.config import ModelConfig
from fastinfer.models.lora import AdapterSlots, LayerAdapters
from fastinfer.ops.pack import TILE_ROWS


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
        adapters: LoRA adapters, of which a batch's ``adapter_ids`` name the slots.
    """

    config: ModelConfig
    dtype: torch.dtype
    embedding: Weight
    layers: tuple[DecoderLayer, ...]
    norm: Tensor
    lm_head: Weight
    cos_sin_cache: Tensor
    adapters: AdapterSlots | None = None

    @torch.inference_mode()
    def forward(self, batch: Batch, kv_cache: KVCacheTensors) -> Tensor:
        """Compute a step, filling the cache.

        Returns:
            [tokens, hidden] of the last layer, before the last norm.
        """
        x = self.embedding.rows(batch.token_ids, self.dtype)
        sizes = self.config.num_heads, self.config.num_kv_heads, self.config.head_dim
        plan = ops.paged_attention_plan(batch.seq_lens, batch.query_start, *sizes)
        for layer, lora, cache in zip(self.layers, self._adapters(batch), kv_cache, strict=True):
            x = self._attention(layer, lora, x, batch, cache, plan)
            x = self._mlp(layer, lora, x)
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

    def with_adapters(self, slots: AdapterSlots) -> "Decoder":
        """The same weights, computing a batch's ``adapter_ids`` with the adapters in these slots."""
        return replace(self, adapters=slots)

    def _adapters(self, batch: Batch) -> Sequence[LayerAdapters | None]:
        if batch.adapter_ids is None:
            return [None] * len(self.layers)
        if self.adapters is None:
            raise ValueError("adapter_ids must be None for a model without adapters")
        return self.adapters.of(batch.adapter_ids)

    def _attention(
        self, layer: DecoderLayer, lora: LayerAdapters | None, x: Tensor, batch: Batch, cache: LayerCache, plan: Tensor
    ) -> Tensor:
        config = self.config
        sizes = [heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
        qkv = layer.qkv.split_linear(x, sizes, norm_weight=layer.attention_norm, eps=config.rms_norm_eps)
        if lora is not None:
            for name, part in zip(("q_proj", "k_proj", "v_proj"), qkv, strict=True):
                lora.add(name, part, x, norm_weight=layer.attention_norm, eps=config.rms_norm_eps)
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
            plan=plan,
        )
        out = out.view(len(x), -1)
        x = layer.output.linear(out, residual=x)
        if lora is not None:
            lora.add("o_proj", x, out)
        return x

    def _mlp(self, layer: DecoderLayer, lora: LayerAdapters | None, x: Tensor) -> Tensor:
        norm_weight, eps, activation = layer.mlp_norm, self.config.rms_norm_eps, self.config.activation
        if lora is None:
            hidden = layer.gate_up.linear(x, norm_weight=norm_weight, eps=eps, activation=activation)
            return layer.down.linear(hidden, residual=x)
        gate_up = layer.gate_up.linear(x, norm_weight=norm_weight, eps=eps).view(len(x), -1, 2, TILE_ROWS)
        lora.add("gate_proj", gate_up[:, :, 0], x, norm_weight=norm_weight, eps=eps)
        lora.add("up_proj", gate_up[:, :, 1], x, norm_weight=norm_weight, eps=eps)
        hidden = _activation_and_mul(gate_up.flatten(2), activation).view(len(x), -1)
        x = layer.down.linear(hidden, residual=x)
        lora.add("down_proj", x, hidden)
        return x


def _activation_and_mul(x: Tensor, activation: str) -> Tensor:
    """Of rows that are gate, then up."""
    if activation == "silu":
        return ops.silu_and_mul(x)
    return ops.gelu_and_mul(x, "tanh" if activation == "gelu_tanh" else "none")
