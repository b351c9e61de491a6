"""MLP of one layer: norm + first product + activation, second product + residual."""

from dataclasses import dataclass

from torch import Tensor

from fastinfer.models.activation import XIELU, activation_and_mul, plain_activation
from fastinfer.models.lora import LayerAdapters
from fastinfer.models.moe import MixtureOfExperts
from fastinfer.models.norm import Norm, RMSNorm
from fastinfer.models.projection import OutputProjection
from fastinfer.ops.pack import TILE_ROWS
from fastinfer.weights.weight import Weight


@dataclass(frozen=True, eq=False)
class GatedMLP:
    """Gated MLP, ``down(activation(gate x) * up x)``.

    In a step with LoRA adapters, the updates of gate and up are added before the activation, which is then a separate
    operator.

    Attributes:
        norm: norm of the input.
        gate_up: projections gate and up, with rows interleaved in runs of 16.
        down: projection back to the residual stream.
        activation: activation of the gate, by its name in :mod:`fastinfer.ops.gemm`.
        limit: limit of both factors, with ``"silu"``, see :func:`fastinfer.ops.silu_and_mul`; the activation is then a
            separate operator. ``None`` for none.
    """

    norm: Norm
    gate_up: Weight
    down: OutputProjection
    activation: str
    limit: float | None = None

    def __call__(self, x: Tensor, residual: Tensor | None, lora: LayerAdapters | None) -> Tensor:
        x, options = self.norm.before_linear(x)
        if lora is None and self.limit is None:
            return self.down(self.gate_up.linear(x, activation=self.activation, **options), residual, None)
        gate_up = self.gate_up.linear(x, **options).view(len(x), -1, 2, TILE_ROWS)
        if lora is not None:
            lora.add("gate_proj", gate_up[:, :, 0], x, **options)
            lora.add("up_proj", gate_up[:, :, 1], x, **options)
        hidden = activation_and_mul(gate_up.flatten(2), self.activation, self.limit).view(len(x), -1)
        return self.down(hidden, residual, lora)


@dataclass(frozen=True, eq=False)
class PlainMLP:
    """MLP without a gate, ``down(activation(up x))``, as in GPT-2, Nemotron-H and Apertus.

    Attributes:
        norm: norm of the input.
        up: [intermediate, hidden].
        down: projection back to the residual stream.
        activation: see :func:`fastinfer.models.activation.plain_activation`.
    """

    norm: Norm
    up: Weight
    down: OutputProjection
    activation: str | XIELU

    def __call__(self, x: Tensor, residual: Tensor, lora: LayerAdapters | None) -> Tensor:
        x, options = self.norm.before_linear(x)
        up = self.up.linear(x, **options)
        if lora is not None:
            lora.add("up_proj", up, x, **options)
        return self.down(plain_activation(up, self.activation), residual, lora)


@dataclass(frozen=True, eq=False)
class MLPBesideExperts:
    """MLP and a mixture of experts with the same input, whose outputs are added and normalised, as in Gemma 4.

    Source: ``Gemma4TextDecoderLayer`` of transformers.

    Attributes:
        mlp: the MLP, with a norm of its output.
        experts: the mixture, likewise.
        post_norm: norm of the sum.
        factor: factor of the result, residual stream included.
    """

    mlp: GatedMLP
    experts: MixtureOfExperts
    post_norm: RMSNorm
    factor: float

    def __call__(self, x: Tensor, residual: Tensor, lora: LayerAdapters | None) -> Tensor:
        both = self.experts(x, self.mlp(x, None, lora), lora)
        return self.post_norm(both, residual, self.factor)


MLP = GatedMLP | PlainMLP | MixtureOfExperts | MLPBesideExperts
