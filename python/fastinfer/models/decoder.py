"""Decoder-only transformer, built from fused operators.

A layer takes six kernel calls: norm + QKV, rotary + cache store, attention, output + residual; norm + gate/up +
activation, down + residual. One with linear attention or Mamba-2 takes seven: two products instead of QKV, convolution,
delta rule or scan, output + residual, and the MLP; one with a short convolution takes five: norm + projection,
convolution, output + residual, and the MLP. One with latent attention has up to four more products around attention,
and with an indexer seven calls more: three products, norm, rotary, cache store and choice; one whose heads are rotated
before their norms takes one call more.
Only operators compute, so a step can be recorded as a graph.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from fastinfer import ops
from fastinfer.models.attention import Attention
from fastinfer.models.batch import Batch
from fastinfer.models.config import ModelConfig
from fastinfer.models.kv_cache import KVCache, LayerCache
from fastinfer.models.latent_attention import LatentAttention, LatentPlan
from fastinfer.models.linear_attention import LinearAttention
from fastinfer.models.lora import AdapterSlots, LayerAdapters
from fastinfer.models.mamba2 import Mamba2
from fastinfer.models.mlp import MLP
from fastinfer.models.norm import Norm, RMSNorm
from fastinfer.models.per_layer_input import PerLayerGate, PerLayerInputs
from fastinfer.models.short_conv import ShortConv
from fastinfer.models.state_cache import StateCache
from fastinfer.ops.prompt import NO_ROW
from fastinfer.weights.weight import Weight


@dataclass(frozen=True, eq=False)
class DecoderLayer:
    """One layer.

    Attributes:
        attention: reads the residual stream, or the input of the layer before, and returns the stream with its output
            added.
        mlp: adds its output to that; ``None`` if the layer has none.
        parallel: whether the MLP reads the same input as attention, instead of attention's output.
        per_layer: adds the output for the layer's own input to that; ``None`` if it has none.
        shares_input: whether attention reads the input of the layer before, instead of its output.
    """

    attention: Attention | LatentAttention | LinearAttention | Mamba2 | ShortConv
    mlp: MLP | None
    parallel: bool = False
    per_layer: PerLayerGate | None = None
    shares_input: bool = False

    def __call__(
        self,
        x: Tensor,
        batch: Batch,
        cache: LayerCache | StateCache,
        plan: Tensor | LatentPlan | None,
        lora: LayerAdapters | None,
        inputs: Tensor | None = None,
        before: Tensor | None = None,
    ) -> Tensor:
        if isinstance(self.attention, LatentAttention):
            assert isinstance(cache, LayerCache)
            assert isinstance(plan, LatentPlan)
            attended = self.attention(x, batch, cache, plan, lora)
        elif isinstance(self.attention, Attention):
            assert isinstance(cache, LayerCache)
            assert isinstance(plan, Tensor)
            source = before if self.shares_input else x
            assert source is not None
            attended = self.attention(source, x, batch, cache, plan, lora)
        else:
            assert isinstance(cache, StateCache)
            attended = self.attention(x, batch, cache, lora)
        x = attended if self.mlp is None else self.mlp(x if self.parallel else attended, attended, lora)
        if self.per_layer is None:
            return x
        assert inputs is not None
        return self.per_layer(x, inputs)


Tap = Callable[[Tensor, Batch], None]


@dataclass(frozen=True, eq=False, kw_only=True)
class TappedLayer(DecoderLayer):
    """Layer that also passes its output on, see :meth:`Decoder.with_taps`."""

    tap: Tap

    def __call__(self, x: Tensor, batch: Batch, *others: Any) -> Tensor:
        x = super().__call__(x, batch, *others)
        self.tap(x, batch)
        return x


@dataclass(frozen=True, eq=False)
class Decoder:
    """A loaded model.

    Attributes:
        config: sizes and constants of the model.
        dtype: dtype of the hidden states.
        exact: whether neither weights nor activations may be rounded, see
            :class:`fastinfer.models.config.Precision`.
        embedding: [vocab, hidden].
        layers: all layers in order.
        norm: norm after the last layer.
        lm_head: [vocab, hidden]; the embedding itself if the two are tied. [draft_vocab, hidden] with ``draft_tokens``.
        embedding_norm: norm of the rows of the embedding, or a factor in the form of a norm; or ``None``.
        position_embedding: [max_position, hidden], or ``None`` for models without learned positions.
        adapters: slots of LoRA adapters, which a batch's ``adapter_ids`` refer to, or ``None``.
        draft_tokens: [draft_vocab] int64, the token of each column of the logits; ``None`` if column i is token i. Only
            draft models have one.
        per_layer_inputs: makes the inputs of these layers, or ``None`` for models without.
    """

    config: ModelConfig
    dtype: torch.dtype
    exact: bool
    embedding: Weight
    layers: tuple[DecoderLayer, ...]
    norm: Norm
    lm_head: Weight
    embedding_norm: RMSNorm | None = None
    position_embedding: Tensor | None = None
    adapters: AdapterSlots | None = None
    draft_tokens: Tensor | None = None
    per_layer_inputs: PerLayerInputs | None = None

    @torch.inference_mode()
    def forward(self, batch: Batch, kv_cache: KVCache) -> Tensor:
        """Compute a step and fill the cache.

        If the batch says which rows of hidden states are wanted, the layers that store nothing are computed for these
        alone. An exact model computes the rows of :func:`fastinfer.ops.prompt_rows` like all others.

        Returns:
            [tokens, hidden], or [n, hidden] for n such rows: output of the last layer before the last norm.
        """
        with ops.prompt_rows(NO_ROW) if self.exact else nullcontext():
            return self._forward(batch, kv_cache)

    def _forward(self, batch: Batch, kv_cache: KVCache) -> Tensor:
        x = self.embed(batch)
        inputs = self._inputs(x, batch)
        if batch.last is None:
            return self._compute(range(len(self.layers)), x, inputs, batch, kv_cache)
        num_storing = self.num_storing_layers
        x = self._compute(range(num_storing), x, inputs, batch, kv_cache)
        if not len(batch.last.rows):
            return x[:0]
        x = ops.embedding(x, batch.last.rows)
        if inputs is not None:
            inputs = ops.embedding(inputs.flatten(1), batch.last.rows).unflatten(1, inputs.shape[1:])
        with ops.prompt_rows(NO_ROW if self.exact else batch.last.first_prompt_row):
            return self._compute(range(num_storing, len(self.layers)), x, inputs, batch.of_last_rows(), kv_cache)

    def outputs(self, batch: Batch, kv_cache: KVCache) -> Iterator[Tensor]:
        """Compute a step piece by piece, so that the caller can compute something else between two pieces.

        All rows of hidden states are wanted. A caller that separates roles does so by :func:`fastinfer.ops.prompt_rows`
        around each piece, and calls in inference mode.

        Yields:
            [tokens, hidden], the input of the first layer, and then the output of each layer.
        """
        x = self.embed(batch)
        yield x
        yield from self._outputs(range(len(self.layers)), x, self._inputs(x, batch), batch, kv_cache)

    def _inputs(self, x: Tensor, batch: Batch) -> Tensor | None:
        """Compute the inputs that layers have of their own, given the embedding; ``None`` for a model without."""
        if self.per_layer_inputs is None:
            return None
        token_ids = batch.token_ids if batch.images is None else batch.images.layer_tokens(batch.token_ids)
        return self.per_layer_inputs(x, token_ids)

    @property
    def num_storing_layers(self) -> int:
        """Number of layers before those that store nothing, see :attr:`ModelConfig.num_storing_layers`."""
        return self.config.num_storing_layers

    def _compute(self, indices: range, x: Tensor, inputs: Tensor | None, batch: Batch, kv_cache: KVCache) -> Tensor:
        """Compute consecutive layers.

        Args:
            indices: the layers.
            x: [tokens, hidden], input of the first one.
            inputs: [tokens, layers, size], inputs that layers have of their own, of all layers; ``None`` for none.
            batch, kv_cache: see :meth:`forward`.

        Returns:
            [tokens, hidden], output of the last one.
        """
        last = deque(self._outputs(indices, x, inputs, batch, kv_cache), maxlen=1)
        return last.pop() if last else x

    def _outputs(
        self, indices: range, x: Tensor, inputs: Tensor | None, batch: Batch, kv_cache: KVCache
    ) -> Iterator[Tensor]:
        """Compute consecutive layers, see :meth:`_compute`, and yield the output of each."""
        plans: dict[tuple[int, ...], Tensor | LatentPlan] = {}
        adapters, before = self._adapters(batch), x
        for index in indices:
            layer, lora, cache = self.layers[index], adapters[index], kv_cache.layers[index]
            attention, plan = layer.attention, None
            if isinstance(attention, Attention | LatentAttention):
                if attention.plan_sizes not in plans:
                    plans[attention.plan_sizes] = attention.plan(batch)
                plan = plans[attention.plan_sizes]
            if not layer.shares_input:
                before = x  # the layer's input, which the next one may share
            x = layer(x, batch, cache, plan, lora, None if inputs is None else inputs[:, index], before)
            if batch.images is not None:
                batch.images.add(x, index)
            yield x

    def embed(self, batch: Batch) -> Tensor:
        """Compute the input of the first layer, [tokens, hidden]."""
        x = self.embedding.rows(batch.token_ids, self.dtype)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        if self.position_embedding is not None:
            x = ops.embedding(self.position_embedding, batch.positions, x)
        if batch.images is not None:
            batch.images.embed(x, self.config.embedding_scale)
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
        """Apply the last norm to rows of the result of :meth:`forward`."""
        normed = self.norm(hidden)  # with the scale of the logits
        return normed if self.config.logits_scale == 1.0 else normed / self.config.logits_scale

    def with_adapters(self, slots: AdapterSlots) -> "Decoder":
        """Return a model with the same weights that applies adapters from these slots, by a batch's ``adapter_ids``."""
        return replace(self, adapters=slots)

    def with_taps(self, taps: Mapping[int, Tap]) -> "Decoder":
        """Return a model with the same weights that passes the residual stream on, as it computes it.

        Args:
            taps: for some layers, a function that gets the layer's output, [tokens, hidden], and the batch. What it
                computes becomes a part of recorded graphs, so it may call operators alone, unless all steps are eager.
        """
        layers = list(self.layers)
        for index, tap in taps.items():
            layer = layers[index]
            layers[index] = TappedLayer(**{f.name: getattr(layer, f.name) for f in fields(DecoderLayer)}, tap=tap)
        return replace(self, layers=tuple(layers))

    def _adapters(self, batch: Batch) -> Sequence[LayerAdapters | None]:
        if batch.adapter_ids is None:
            return [None] * len(self.layers)
        return self._slots().of(batch.adapter_ids)

    def _slots(self) -> AdapterSlots:
        if self.adapters is None:
            raise ValueError("adapter_ids must be None for a model without adapters, got a tensor")
        return self.adapters
