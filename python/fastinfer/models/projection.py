"""Linear layer that adds the output of attention or MLP to the residual stream."""

from dataclasses import dataclass

from torch import Tensor

from fastinfer.models.lora import LayerAdapters
from fastinfer.models.norm import RMSNorm
from fastinfer.weights.weight import Weight


@dataclass(frozen=True, eq=False)
class OutputProjection:
    """Output projection, ``residual + weight x``, or ``residual + norm(weight x)`` with a post-norm.

    Attributes:
        name: name of the module for adapters.
        weight: [hidden, in_features].
        post_norm: norm of the output (Gemma 2 and 3), or ``None``.
    """

    name: str
    weight: Weight
    post_norm: RMSNorm | None = None

    def __call__(self, x: Tensor, residual: Tensor, lora: LayerAdapters | None) -> Tensor:
        out = self.weight.linear(x) if self.post_norm else self.weight.linear(x, residual=residual)
        if lora is not None:
            lora.add(self.name, out, x)
        return self.post_norm(out, residual) if self.post_norm else out
