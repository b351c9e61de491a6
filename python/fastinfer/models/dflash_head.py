"""DFlash heads: all drafts come from one pass over a block of masked tokens.

Each layer has keys and values of the text, projections of one product of the outputs of several layers of the model;
they need no pass through the head, so the model's own steps store them. A block is the newest token of the text, which
the model has not computed yet, and a mask token for each draft. Its tokens see the text and each other, also those
after them, but in layers with a window only themselves and what is before them, unless the head was trained otherwise.
The output at a mask is the draft at its place.

DFlash2 adds convolutions over the tokens of a block, and chooses each draft by the one before it. DSpark adds to the
logits what the draft before says, and its newest token gives the first draft, the first mask the second one, and so on.

Sources: https://arxiv.org/abs/2602.06036, https://github.com/z-lab/dflash for the windows and DFlash2, and
https://github.com/deepseek-ai/DeepSpec.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import Self

from fastinfer import ops
from fastinfer.models.attention import Attention
from fastinfer.models.batch import Batch
from fastinfer.models.column_join import ColumnJoin
from fastinfer.models.config import BlockConfig
from fastinfer.models.decoder import Decoder
from fastinfer.models.draft_chain import DraftChain
from fastinfer.models.draft_head import DraftHead
from fastinfer.models.kv_cache import KVCache, LayerCache
from fastinfer.models.norm import RMSNorm
from fastinfer.weights.weight import ConcatenatedWeight, Weight


@dataclass(frozen=True, eq=False, kw_only=True)
class DFlashHead(DraftHead):
    """A head that drafts a block of tokens at once.

    To the kernels each token of a block is a sequence of its own, whose text ends with the block.

    Attributes:
        fc: [hidden, n * hidden], projection of the outputs of ``n`` layers.
        feature_norm: norm of its result, from which all layers project keys and values.
        join: joins the outputs; ``None`` before :meth:`for_model`.
        chain: changes the logits of each draft by the one before it; ``None`` if it is drawn without.
    """

    fc: Weight
    feature_norm: RMSNorm
    join: ColumnJoin | None = None
    chain: DraftChain | None = None

    @property
    def block(self) -> BlockConfig:
        """Settings of the blocks."""
        assert self.config.block is not None
        return self.config.block

    @property
    def device(self) -> torch.device:
        return self.feature_norm.weight.device

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return self.block.feature_layers

    def store(self, outputs: list[Tensor], batch: Batch, kv_cache: KVCache) -> None:
        assert self.join is not None
        positions, slots = self.here(batch.positions), self.slots(batch, kv_cache)
        features = self.feature_norm(self.fc.linear(self.join(outputs)))
        for layer, cache in zip(self.layers, kv_cache.layers, strict=True):
            attention = layer.attention
            assert isinstance(attention, Attention)
            assert isinstance(attention.qkv, ConcatenatedWeight)
            assert isinstance(cache, LayerCache)
            k, v = (
                part.linear(features).view(len(features), -1, attention.head_dim) for part in attention.qkv.parts[1:]
            )
            ops.norm_rotary_store(
                k[:, :0],
                k,
                v,
                None,
                attention.k_norm,
                attention.qk_norm_eps,
                positions,
                attention.cos_sin_cache,
                attention.interleaved,
                cache.k,
                cache.v,
                cache.k_scale,
                cache.v_scale,
                slots,
            )

    def for_model(self, model: Decoder, max_tokens: int) -> Self:
        norm, scale = self.feature_norm, model.config.stream_scale
        return replace(
            super().for_model(model, max_tokens),
            join=ColumnJoin(len(self.feature_layers), max_tokens, self.device),
            feature_norm=replace(norm, eps=norm.eps / scale**2),  # whose input is ``scale`` times as small
        )
