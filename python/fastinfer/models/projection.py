"""Linear layer that adds the output of attention or MLP to the residual stream."""

from dataclasses import dataclass

from torch import Tensor

from fastinfer.models.lora import LayerAdapters
from fastinfer.models.norm import RMSNorm
from fastinfer.weights.weight import Weight


@dataclass(frozen=True, eq=False)
class OutputProjection:
    """Output projection, ``residual + weight x``, or ``(residual + norm(weight x)) * factor`` with a post-norm.

    Attributes:
        name: name of the module for adapters.
        weight: [hidden, in_features].
        post_norm: norm of the output, or ``None``.
        factor: see above.
    """

    name: str
    weight: Weight
    post_norm: RMSNorm | None = None
    factor: float = 1.0

    def __call__(self, x: Tensor, residual: Tensor | None, lora: LayerAdapters | None) -> Tensor:
        out = self.weight.linear(x) if self.post_norm else self.weight.linear(x, residual=residual)
        if lora is not None:
            lora.add(self.name, out, x)
        return self.post_norm(out, residual, self.factor) if self.post_norm else out
