"""The linear layer with which attention and MLP return to the residual stream."""

from dataclasses import dataclass

from torch import Tensor

from fastinfer.models.lora import LayerAdapters
from fastinfer.models.norm import RMSNorm
from fastinfer.weights.weight import Weight


@dataclass(frozen=True, eq=False)
class OutputProjection:
    """``residual + weight x``, or with a norm of its own ``residual + norm(weight x)``.

    Attributes:
        name: of the module to adapters.
        weight: [hidden, in_features].
        post_norm: Gemma 2 and 3 have one.
    """

    name: str
    weight: Weight
    post_norm: RMSNorm | None = None

    def __call__(self, x: Tensor, residual: Tensor, lora: LayerAdapters | None) -> Tensor:
        out = self.weight.linear(x) if self.post_norm else self.weight.linear(x, residual=residual)
        if lora is not None:
            lora.add(self.name, out, x)
        return self.post_norm(out, residual) if self.post_norm else out
