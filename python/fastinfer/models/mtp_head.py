"""Draft heads that come with a model: its layer for multi-token prediction (MTP).

Such a layer was trained with the model to predict the token after the next one. Its input is a product of the next
token and of the model's normalised output, and its own normalised output takes the latter's place for further drafts.
Multi-token prediction: DeepSeek-AI, 2024, https://arxiv.org/abs/2412.19437.
"""

from dataclasses import dataclass, replace

from torch import Tensor
from typing_extensions import Self

from fastinfer.models.decoder import Decoder
from fastinfer.models.draft_head import DraftHead
from fastinfer.models.norm import Norm
from fastinfer.weights.weight import Weight


@dataclass(frozen=True, eq=False, kw_only=True)
class MTPHead(DraftHead):
    """Layer for multi-token prediction, with the embedding and the output layer of its model.

    Attributes:
        fc: [hidden, 2 * hidden], projection of a token and the features of the token before.
        model_norm: norm after the model's last layer; ``None`` before :meth:`for_model`.
        last_layer: number of that layer; ``None`` before :meth:`for_model`.
    """

    fc: Weight
    model_norm: Norm | None = None
    last_layer: int | None = None

    @property
    def feature_layers(self) -> tuple[int, ...]:
        assert self.last_layer is not None
        return (self.last_layer,)

    def features(self, outputs: list[Tensor]) -> Tensor:
        [output] = outputs
        assert self.model_norm is not None
        return self.model_norm(output)

    def layer_inputs(self, tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        assert self.join is not None
        x = self.fc.linear(self.join([self.token_norm(tokens), self.feature_norm(features)]))
        return x, x

    def for_model(self, model: Decoder, max_tokens: int) -> Self:
        head = replace(self, model_norm=model.norm, last_layer=model.config.num_layers - 1)
        return super(MTPHead, head).for_model(model, max_tokens)
