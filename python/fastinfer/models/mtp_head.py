"""Draft heads that come with a model: its layers for multi-token prediction (MTP).

Such layers were trained with the model. The first one predicts the token after the next one: its input is a product of
the next token and of the model's normalised output. Each further layer predicts one token more, from the normalised
output of the layer before it. Multi-token prediction: DeepSeek-AI, 2024, https://arxiv.org/abs/2412.19437.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import Self

from fastinfer.models.decoder import Decoder
from fastinfer.models.draft_head import ChainHead
from fastinfer.models.norm import Norm, RMSNorm
from fastinfer.weights.weight import Weight


@dataclass(frozen=True, eq=False, kw_only=True)
class MTPEnds:
    """Parts of a layer for multi-token prediction before and after its transformer layer.

    Attributes:
        token_norm, feature_norm: norms of the rows of the embedding and of the features.
        fc: [hidden, 2 * hidden], projection of a token and the features of the token before.
        norm: norm of the output.
    """

    token_norm: RMSNorm
    feature_norm: RMSNorm
    fc: Weight
    norm: RMSNorm


@dataclass(frozen=True, eq=False, kw_only=True)
class MTPHead(ChainHead):
    """Layers for multi-token prediction, with the embedding and the output layer of their model.

    Their hidden states are normalised: each layer has a norm of its own.

    Attributes:
        ends: the other parts of each layer.
        model_norm: norm after the model's last layer; ``None`` before :meth:`for_model`.
        last_layer: number of that layer; ``None`` before :meth:`for_model`.
    """

    ends: tuple[MTPEnds, ...]
    model_norm: Norm | None = None
    last_layer: int | None = None

    @property
    def device(self) -> torch.device:
        return self.ends[0].norm.weight.device

    @property
    def feature_layers(self) -> tuple[int, ...]:
        assert self.last_layer is not None
        return (self.last_layer,)

    def features(self, outputs: list[Tensor]) -> Tensor:
        [output] = outputs
        assert self.model_norm is not None
        return self.model_norm(output)

    def layer_inputs(self, layer: int, tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        assert self.join is not None
        ends = self.ends[layer]
        x = ends.fc.linear(self.join([ends.token_norm(tokens), ends.feature_norm(features)]))
        return x, x

    def layer_outputs(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.ends[layer].norm(x)
        return normed, normed

    def for_model(self, model: Decoder, max_tokens: int) -> Self:
        head = replace(self, model_norm=model.norm, last_layer=model.config.num_layers - 1)
        return super(MTPHead, head).for_model(model, max_tokens)
