"""Draft heads: layers that draft tokens from the hidden states of the model that verifies them.

Taps in the model's layers pass their outputs to the head in the same step. What the head keeps of them lies in a cache
of its own, under the same slots as the model's keys and values. A slot's content follows from the tokens up to it, so
prefixes, forks and copies of blocks work as they do for keys and values.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from typing_extensions import Self

from fastinfer import ops
from fastinfer.errors import RequestError
from fastinfer.models.attention import Attention
from fastinfer.models.batch import Batch
from fastinfer.models.column_join import ColumnJoin
from fastinfer.models.decoder import Decoder
from fastinfer.models.kv_cache import KVCache, LayerCache
from fastinfer.models.latent_attention import LatentAttention
from fastinfer.models.moves import moved
from fastinfer.models.state_cache import StateCache
from fastinfer.weights.weight import Weight


@dataclass(frozen=True, eq=False, kw_only=True)
class DraftHead(Decoder, ABC):
    """A draft head, in the interface of a model.

    An embedding or output layer that the head does not have is the one of the model that it drafts for.
    """

    embedding: Weight | None  # type: ignore[assignment]
    lm_head: Weight | None  # type: ignore[assignment]

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Device of the head."""

    @property
    @abstractmethod
    def feature_layers(self) -> tuple[int, ...]:
        """The layers of the model whose outputs the head reads, in ascending order."""

    @abstractmethod
    def store(self, outputs: list[Tensor], batch: Batch, kv_cache: KVCache) -> None:
        """Store what the head keeps of the model's tokens.

        Args:
            outputs: outputs of :attr:`feature_layers`, each [tokens, hidden], on the head's device.
            batch: the tokens, on the device of the last of these layers.
            kv_cache: the head's cache.
        """

    def here(self, x: Tensor) -> Tensor:
        """Copy a tensor to the head's device, unless it is there: a layer may be on another one."""
        return x if x.device == self.device else moved(x, str(self.device))

    def slots(self, batch: Batch, kv_cache: KVCache) -> Tensor:
        """Return the slots of a batch's tokens in the head's cache, [tokens] int64, on its device."""
        cache = kv_cache.layers[0]
        assert isinstance(cache, LayerCache)
        return self.here(batch.slot_mappings[cache.group])

    def for_model(self, model: Decoder, max_tokens: int) -> Self:
        """Return the head with what it shares with a model.

        Args:
            model: the model that it drafts for.
            max_tokens: largest number of tokens in a batch.

        Raises:
            RequestError: the model does not have the layers whose outputs the head reads.
        """
        count = model.config.num_layers
        if not all(0 <= layer < count for layer in self.feature_layers):
            raise RequestError(
                f"the draft head reads the outputs of layers {self.feature_layers}, but the model has {count} layers"
            )
        return replace(
            self,
            embedding=model.embedding if self.embedding is None else self.embedding,
            lm_head=model.lm_head if self.lm_head is None else self.lm_head,
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class ChainHead(DraftHead):
    """A draft head that drafts one token after the other.

    Its input at position i is the token there and the *features* of the token before: a function of the model's hidden
    states at position i - 1. Its output gives the token at i + 1, and stands for the features of token i until the
    model has computed them. This is how a head drafts several tokens in a row.

    It may have several layers, which form a chain: the first draft is that of the first layer, the second draft that of
    the second layer, and so on. The features of a layer are the outputs of the layer before it, those of the first
    layer come from the model. All layers see the same tokens. The last layer also makes all further drafts, from its
    own outputs.

    Features are cached beside keys and values. The first token of a sequence has no token before it, and reads its own
    features; in other implementations the first input is that of the second token. The hidden states are those of the
    first layer that a batch computes.

    Attributes:
        join: joins the two halves of a layer's input; ``None`` before :meth:`for_model`.
    """

    join: ColumnJoin | None = None

    @abstractmethod
    def features(self, outputs: list[Tensor]) -> Tensor:
        """Compute features, [tokens, hidden], from the outputs of :attr:`feature_layers`."""

    @abstractmethod
    def layer_inputs(self, layer: int, tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return the residual stream before a layer, and what attention reads.

        Args:
            layer: number of the layer.
            tokens: [tokens, hidden], rows of the embedding.
            features: [tokens, hidden].
        """

    @abstractmethod
    def layer_outputs(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the logits are computed from, and the features that the output of a layer stands for.

        Args:
            layer: number of the layer.
            x: [tokens, hidden], its output.
        """

    def store(self, outputs: list[Tensor], batch: Batch, kv_cache: KVCache) -> None:
        store_features(kv_cache.layers[0], self.features(outputs), self.slots(batch, kv_cache))

    def for_model(self, model: Decoder, max_tokens: int) -> Self:
        head = super().for_model(model, max_tokens)
        return replace(head, join=ColumnJoin(2, max_tokens, self.device))

    @torch.inference_mode()
    def forward(self, batch: Batch, kv_cache: KVCache) -> Tensor:
        """Compute a step from one layer on, fill the cache, and store outputs as features; see :class:`Decoder`."""
        places, result = batch.features, None
        assert places is not None
        assert self.embedding is not None
        tokens = self.embedding.rows(batch.token_ids, self.dtype)
        last = len(self.layers) - 1
        for index in range(places.first_layer, last + 1):
            layer, cache = self.layers[index], kv_cache.layers[index]
            assert isinstance(cache, LayerCache)
            assert isinstance(layer.attention, Attention | LatentAttention)
            assert cache.features is not None
            features = ops.embedding(cache.features.flatten(0, 2), places.reads, dtype=self.dtype)
            x, before = self.layer_inputs(index, tokens, features)
            x = layer(x, batch, cache, layer.attention.plan(batch), None, None, before)
            hidden, features = self.layer_outputs(index, x)
            if index < last:
                store_features(kv_cache.layers[index + 1], features, batch.slot_mappings[cache.group])
            elif places.first_layer == last:  # otherwise the layer before has stored better ones
                store_features(cache, features, places.writes)
            result = hidden if result is None else result
        assert result is not None
        return result


def store_features(cache: LayerCache | StateCache, features: Tensor, slots: Tensor) -> None:
    """Store features, [tokens, hidden], under slots, [tokens] int64; those with the slot -1 are skipped."""
    assert isinstance(cache, LayerCache)
    assert cache.features is not None
    rows = features[:, None]
    ops.store_kv_cache(rows, rows, cache.features, cache.features, slots)


class FeatureWriter:
    """Passes the hidden states of a model's steps to a draft head.

    Args:
        head: the head.
        kv_cache: its cache.
    """

    def __init__(self, head: DraftHead, kv_cache: KVCache) -> None:
        self._head = head
        self._kv_cache = kv_cache
        self._outputs: dict[int, Tensor] = {}

    def tapped(self, model: Decoder) -> Decoder:
        """Return the model with taps that let the head store what it needs of each step."""
        return model.with_taps({layer: partial(self._add, layer) for layer in self._head.feature_layers})

    def _add(self, layer: int, x: Tensor, batch: Batch) -> None:
        self._outputs[layer] = self._head.here(x)
        layers = self._head.feature_layers
        if layer == layers[-1]:
            self._head.store([self._outputs.pop(index) for index in layers], batch, self._kv_cache)
