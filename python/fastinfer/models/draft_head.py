"""Draft heads: a layer that drafts tokens from the hidden states of the model that verifies them.

A head's input at position i is the token there and the *features* of the token before: a function of the model's
hidden states at position i - 1. Its output gives the token at i + 1, and stands for the features of token i until the
model has computed them. This is how a head drafts several tokens in a row.

Features are cached like keys and values, under the same slots. A slot's content follows from the tokens up to it, so
prefixes, forks and copies of blocks work as they do for keys and values. The first token of a sequence has no token
before it, and reads its own features; in other implementations the first input is that of the second token.

EAGLE-3: Li et al., 2025, https://arxiv.org/abs/2503.01840. Multi-token prediction: DeepSeek-AI, 2024,
https://arxiv.org/abs/2412.19437.
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
from fastinfer.models.norm import RMSNorm, factor_norm
from fastinfer.weights.weight import Weight


@dataclass(frozen=True, eq=False, kw_only=True)
class DraftHead(Decoder, ABC):
    """A draft head of one layer, in the interface of a model.

    Its hidden states are those after the layer. An embedding or output layer that the head does not have is the one of
    the model that it drafts for.

    Attributes:
        token_norm, feature_norm: norms of the rows of the embedding and of the features.
        norm_output: whether the output is normalised before it stands for features.
        join: joins the two halves of the layer's input; ``None`` before :meth:`for_model`.
    """

    embedding: Weight | None  # type: ignore[assignment]
    lm_head: Weight | None  # type: ignore[assignment]
    token_norm: RMSNorm
    feature_norm: RMSNorm
    norm_output: bool = False
    join: ColumnJoin | None = None

    @property
    @abstractmethod
    def feature_layers(self) -> tuple[int, ...]:
        """The layers of the model whose outputs the features are computed from, in ascending order."""

    @abstractmethod
    def features(self, outputs: list[Tensor]) -> Tensor:
        """Compute features, [tokens, hidden], from the outputs of :attr:`feature_layers`."""

    @abstractmethod
    def layer_inputs(self, tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return the residual stream before the layer, and what attention reads.

        Args:
            tokens: [tokens, hidden], rows of the embedding.
            features: [tokens, hidden].
        """

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
            join=ColumnJoin(2, max_tokens, self.feature_norm.weight.device),
        )

    @torch.inference_mode()
    def forward(self, batch: Batch, kv_cache: KVCache) -> Tensor:
        """Compute a step, fill the cache, and store the wanted outputs as features; see :class:`Decoder`."""
        [cache], [layer] = kv_cache.layers, self.layers
        assert isinstance(cache, LayerCache)
        assert isinstance(layer.attention, Attention | LatentAttention)
        assert cache.features is not None
        assert batch.features is not None
        assert self.embedding is not None
        tokens = self.embedding.rows(batch.token_ids, self.dtype)
        features = ops.embedding(cache.features.flatten(0, 2), batch.features.reads, dtype=self.dtype)
        x, before = self.layer_inputs(tokens, features)
        x = layer(x, batch, cache, layer.attention.plan(batch), None, None, before)
        store_features(cache, self.norm(x) if self.norm_output else x, batch.features.writes)
        return x


def store_features(cache: LayerCache, features: Tensor, slots: Tensor) -> None:
    """Store features, [tokens, hidden], under slots, [tokens] int64; those with the slot -1 are skipped."""
    assert cache.features is not None
    rows = features[:, None]
    ops.store_kv_cache(rows, rows, cache.features, cache.features, slots)


class FeatureWriter:
    """Computes the features of a model's steps and stores them in the cache of a draft head.

    Args:
        head: the head.
        kv_cache: its cache.
    """

    def __init__(self, head: DraftHead, kv_cache: KVCache) -> None:
        self._head = head
        self._kv_cache = kv_cache
        self._outputs: dict[int, Tensor] = {}

    def tapped(self, model: Decoder) -> Decoder:
        """Return the model with taps that write the features of each step."""
        return model.with_taps({layer: partial(self._add, layer) for layer in self._head.feature_layers})

    def _add(self, layer: int, x: Tensor, batch: Batch) -> None:
        self._outputs[layer] = self._at_head(x)
        layers = self._head.feature_layers
        if layer == layers[-1]:
            outputs = [self._outputs.pop(index) for index in layers]
            [cache] = self._kv_cache.layers
            assert isinstance(cache, LayerCache)
            slots = self._at_head(batch.slot_mappings[cache.group])
            store_features(cache, self._head.features(outputs), slots)

    def _at_head(self, x: Tensor) -> Tensor:
        """Copy a tensor to the head's device, unless it is there: a layer may be on another one."""
        device = self._head.feature_norm.weight.device
        return x if x.device == device else moved(x, str(device))


@dataclass(frozen=True, eq=False, kw_only=True)
class EagleHead(DraftHead):
    """EAGLE-3: features are a product of the outputs of several layers, and attention reads tokens and features.

    Attributes:
        aux_layers: the layers whose inputs the features are computed from; ``None``, before :meth:`for_model`, for the
            usual ones.
        fc: [hidden, n * hidden], projection of the inputs of the ``n`` layers.
        fc_norm: norm of all these inputs together, or ``None``.
        aux_norms: norms of each of them, which are also factors; empty for none.
        norm_residual: whether the residual stream begins with the normalised features.
        aux_join: joins these inputs; ``None`` before :meth:`for_model`.
    """

    aux_layers: tuple[int, ...] | None
    fc: Weight
    fc_norm: RMSNorm | None = None
    aux_norms: tuple[RMSNorm, ...] = ()
    norm_residual: bool = False
    aux_join: ColumnJoin | None = None

    @property
    def feature_layers(self) -> tuple[int, ...]:
        assert self.aux_layers is not None
        return tuple(layer - 1 for layer in self.aux_layers)

    def features(self, outputs: list[Tensor]) -> Tensor:
        if self.aux_norms:
            outputs = [norm(x) for norm, x in zip(self.aux_norms, outputs, strict=True)]
        assert self.aux_join is not None
        x = self.aux_join(outputs)
        if self.fc_norm is None:
            return self.fc.linear(x)
        x, options = self.fc_norm.before_linear(x)
        return self.fc.linear(x, **options)

    def layer_inputs(self, tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.feature_norm(features)
        assert self.join is not None
        return normed if self.norm_residual else features, self.join([self.token_norm(tokens), normed])

    def for_model(self, model: Decoder, max_tokens: int) -> Self:
        aux_layers = self.aux_layers or usual_aux_layers(model.config.num_layers)
        count, device = len(aux_layers), self.feature_norm.weight.device
        scale, norms = model.config.stream_scale, self.aux_norms
        if scale != 1.0 and norms:
            norms = tuple(replace(norm, eps=norm.eps / scale**2) for norm in norms)
        elif scale != 1.0:
            norms = (factor_norm(scale, self.config.hidden_size, str(device)),) * count
        head = replace(self, aux_layers=aux_layers, aux_norms=norms, aux_join=ColumnJoin(count, max_tokens, device))
        return super(EagleHead, head).for_model(model, max_tokens)


def usual_aux_layers(num_layers: int) -> tuple[int, int, int]:
    """Return the layers whose inputs a head reads that names none: an early, a middle and a late one."""
    return 2, num_layers // 2, num_layers - 3
