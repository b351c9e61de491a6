"""EAGLE-3 heads: features are a product of the outputs of several layers of the model.

Li et al., 2025, https://arxiv.org/abs/2503.01840.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import Self

from fastinfer.errors import RequestError
from fastinfer.models.column_join import ColumnJoin
from fastinfer.models.decoder import Decoder
from fastinfer.models.draft_head import ChainHead
from fastinfer.models.norm import RMSNorm, factor_norm
from fastinfer.weights.weight import Weight


@dataclass(frozen=True, eq=False, kw_only=True)
class EagleHead(ChainHead):
    """Head of one layer, whose attention reads tokens and features beside each other.

    Attributes:
        token_norm, feature_norm: norms of the rows of the embedding and of the features.
        norm_output: whether the output is normalised before it stands for features.
        aux_layers: the layers whose inputs the features are computed from; ``None``, before :meth:`for_model`, for the
            usual ones.
        fc: [hidden, n * hidden], projection of the inputs of the ``n`` layers.
        fc_norm: norm of all these inputs together, or ``None``.
        aux_norms: norms of each of them, which are also factors; empty for none.
        norm_residual: whether the residual stream begins with the normalised features.
        aux_join: joins these inputs; ``None`` before :meth:`for_model`.
    """

    token_norm: RMSNorm
    feature_norm: RMSNorm
    norm_output: bool = False
    aux_layers: tuple[int, ...] | None
    fc: Weight
    fc_norm: RMSNorm | None = None
    aux_norms: tuple[RMSNorm, ...] = ()
    norm_residual: bool = False
    aux_join: ColumnJoin | None = None

    @property
    def device(self) -> torch.device:
        return self.feature_norm.weight.device

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

    def layer_inputs(self, layer: int, tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.feature_norm(features)
        assert self.join is not None
        return normed if self.norm_residual else features, self.join([self.token_norm(tokens), normed])

    def layer_outputs(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.norm(x) if self.norm_output else x

    def for_model(self, model: Decoder, max_tokens: int) -> Self:
        aux_layers = self.aux_layers or usual_aux_layers(model.config.num_layers)
        count, device = len(aux_layers), self.device
        scale, norms = model.config.stream_scale, self.aux_norms
        if scale != 1.0 and norms:
            norms = tuple(replace(norm, eps=norm.eps / scale**2) for norm in norms)
        elif scale != 1.0:
            norms = (factor_norm(scale, self.config.hidden_size, str(device)),) * count
        head = replace(self, aux_layers=aux_layers, aux_norms=norms, aux_join=ColumnJoin(count, max_tokens, device))
        return super(EagleHead, head).for_model(model, max_tokens)


def usual_aux_layers(num_layers: int) -> tuple[int, int, int]:
    """Return the layers whose inputs a head reads that names none: an early, a middle and a late one.

    Raises:
        RequestError: the model has too few layers for three different ones.
    """
    if num_layers < 7:
        raise RequestError(f"a draft head that names no layers needs a model of at least 7 layers, got {num_layers}")
    return 2, num_layers // 2, num_layers - 3
