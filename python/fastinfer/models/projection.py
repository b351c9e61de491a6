"""Linear layer that adds the output of attention or MLP to the residual stream."""

from dataclasses import dataclass

from torch import Tensor

from fastinfer import ops
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
        order: [in_features] int64, the order of the inputs that the weight reads; ``None`` for their own.
    """

    name: str
    weight: Weight
    post_norm: RMSNorm | None = None
    factor: float = 1.0
    order: Tensor | None = None

    def __call__(self, x: Tensor, residual: Tensor | None, lora: LayerAdapters | None) -> Tensor:
        x = self.weight.gather_input(x)
        ordered = x if self.order is None else ops.permute_columns(x, self.order)
        out = self.weight.linear(ordered) if self.post_norm else self.weight.linear(ordered, residual=residual)
        if lora is not None:
            lora.add(self.name, out, x)
        return self.post_norm(out, residual, self.factor) if self.post_norm else out
