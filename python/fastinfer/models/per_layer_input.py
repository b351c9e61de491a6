"""Inputs that each layer has of its own, as in Gemma 4 E2B and E4B.

Source: ``Gemma4TextModel`` of transformers.
"""

from dataclasses import dataclass

from torch import Tensor

from fastinfer import ops
from fastinfer.models.activation import approximation
from fastinfer.models.norm import RMSNorm
from fastinfer.models.projection import OutputProjection
from fastinfer.weights.weight import Weight


@dataclass(frozen=True, eq=False)
class PerLayerInputs:
    """The inputs of consecutive layers: ``(norm(projection x) + rows of a second embedding) * factor``.

    Attributes:
        embedding: [vocab, layers * size].
        projection: [layers * size, hidden].
        norm: norm of the projections for each layer.
        factor: see above.
        size: width of a layer's input.
    """

    embedding: Weight
    projection: Weight
    norm: RMSNorm
    factor: float
    size: int

    def __call__(self, x: Tensor, token_ids: Tensor) -> Tensor:
        """Return [tokens, layers, size] for the rows ``x`` of the first embedding and their tokens."""
        rows = self.embedding.rows(token_ids, x.dtype)
        shape = len(x), -1, self.size
        return self.norm(self.projection.linear(x).view(shape), rows.view(shape), self.factor)


@dataclass(frozen=True, eq=False)
class PerLayerGate:
    """Gate by which a layer adds its own input: ``output(activation(gate x) * input)``.

    Attributes:
        gate: [size, hidden].
        activation: ``"gelu_tanh"`` or ``"gelu"``.
        output: projection back to the residual stream.
    """

    gate: Weight
    activation: str
    output: OutputProjection

    def __call__(self, x: Tensor, inputs: Tensor) -> Tensor:
        """Add to the residual stream ``x`` [tokens, hidden], given the layer's ``inputs`` [tokens, size]."""
        gated = ops.gelu(self.gate.linear(x), approximation(self.activation), inputs)
        return self.output(gated, x, None)
