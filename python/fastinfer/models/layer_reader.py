"""Reading of what all layers consist of: weights, norms and projections back to the residual stream."""

from collections.abc import Iterable

import torch
from torch import Tensor

from fastinfer.formats.unpacked import Dense, Unpacked, concatenate
from fastinfer.models.checkpoint import Checkpoint, split_name, tiled_rows
from fastinfer.models.config import Precision
from fastinfer.models.norm import LayerNorm, NoNorm, Norm, RMSNorm
from fastinfer.models.projection import OutputProjection
from fastinfer.models.state_config import LinearAttentionConfig
from fastinfer.utils.huge_pages import HugePages
from fastinfer.weights.expert_weights import ExpertWeights, make_expert_weights
from fastinfer.weights.pack import make_weight
from fastinfer.weights.weight import ConcatenatedWeight, Weight

# A matrix's name, its rows and its bias.
Part = tuple[str, Unpacked, Tensor | None]


class LayerReader:
    """Reader of the parts of a checkpoint's layers.

    A subclass that needs other weights than the checkpoint's overrides :meth:`weight` and :meth:`experts`.

    Attributes:
        checkpoint, config: an open checkpoint, and its sizes and constants.
        precision: precision in which the model computes.
        device: device of the weights.
        experts_device: device of the weights of experts, if a subclass puts them elsewhere; ``None`` otherwise.
        scale: see :attr:`fastinfer.models.config.ModelConfig.stream_scale`.
    """

    def __init__(self, checkpoint: Checkpoint, precision: Precision, device: str) -> None:
        self.checkpoint = checkpoint
        self.config = config = checkpoint.config
        self.precision = precision
        self.device = device
        self.experts_device: str | None = None
        self._memory = HugePages() if device == "cpu" else None
        # GPU products need dense weights in the dtype of the hidden states.
        self._dense_dtype = None if device == "cpu" else precision.dtype
        self.scale = config.stream_scale

    def weight(
        self,
        names: tuple[str, ...],
        unpacked: Unpacked,
        bias: Tensor | None,
        activation_bits: int | None = None,
        factor: float = 1.0,
    ) -> Weight:
        """Pack a layer's weight.

        Args:
            names: matrices whose rows the weight contains, concatenated; gate and up are interleaved in runs of 16. A
                matrix may be in several weights of a layer, which are read in the order of its rows.
            unpacked: the weight, unpacked.
            bias: [out_features], with rows in the same order, or ``None``.
            activation_bits: precision of the inputs of its products; ``None`` for the model's.
            factor: factor of the weight without its bias; a weight with another one than 1 is packed as a dense one.
        """
        if factor != 1.0:
            unpacked = Dense(unpacked.dequantize() * factor)
        return self.make(unpacked, activation_bits or self.precision.activation_bits, bias)

    def own_experts(self) -> range:
        """Return the experts of a layer that are read."""
        return range(self.config.num_experts)

    def experts(self, names: list[tuple[str, ...]], unpacked: list[Unpacked], bias: Tensor | None) -> ExpertWeights:
        """Pack a weight of all experts of a layer.

        Args:
            names: for each expert, the matrices that its weight contains; see :meth:`weight`.
            unpacked: for each expert, its weight, unpacked.
            bias: [experts, out_features], with rows in the same order, or ``None``.
        """
        return self.make_experts(unpacked, bias)

    def make(
        self,
        unpacked: Unpacked | Iterable[Unpacked],
        activation_bits: int,
        bias: Tensor | None = None,
        rows: int | None = None,
    ) -> Weight:
        """Pack a weight for products with inputs of this precision; see :func:`fastinfer.weights.pack.make_weight`."""
        return make_weight(unpacked, activation_bits, self.device, self._dense_dtype, bias, self._memory, rows)

    def make_experts(self, unpacked: list[Unpacked], bias: Tensor | None = None) -> ExpertWeights:
        """Pack a weight of all experts; see :func:`fastinfer.weights.expert_weights.make_expert_weights`."""
        bits = self.precision.activation_bits
        return make_expert_weights(unpacked, bits, self.device, self._dense_dtype, bias, self._memory)

    def concatenated(self, sizes: dict[str, int], has_bias: bool, is_split: bool = False) -> Weight:
        """Read matrices with the same input, and concatenate their rows.

        If their forms differ, or with ``is_split``, each is a weight of its own.
        """
        return self.joined(self.read(sizes, has_bias), is_split)

    def read(self, sizes: dict[str, int], has_bias: bool) -> list[Part]:
        """Read matrices with the same input, given their numbers of rows by name."""
        linear, hidden = self.checkpoint.linear, self.config.hidden_size
        return [
            (name, linear(name, size, hidden), self.vector(f"{name}.bias", size) if has_bias else None)
            for name, size in sizes.items()
        ]

    def joined(self, parts: list[Part], is_split: bool) -> Weight:
        """Concatenate the rows of matrices with the same input, if their forms do not differ, unless ``is_split``."""
        names, matrices, biases = zip(*parts, strict=True)
        if not is_split and all(matrices[0].fits(matrix) for matrix in matrices):
            return self.weight(names, concatenate(matrices), None if biases[0] is None else torch.cat(biases))
        return ConcatenatedWeight(tuple(self.weight((name,), matrix, bias) for name, matrix, bias in parts))

    def output(
        self,
        name: str,
        in_features: int,
        has_bias: bool,
        post_norm: str,
        scale: float | None = None,
        factor: float = 1.0,
    ) -> OutputProjection:
        """Read an output projection, for a residual stream that is ``scale`` times smaller than the model's."""
        config = self.config
        weight = self.checkpoint.linear(name, config.hidden_size, in_features)
        bias = self.vector(f"{name}.bias", config.hidden_size) if has_bias else None
        norm = self.post_norm(post_norm, scale) if config.has_post_norms(split_name(name)[0]) else None
        module = name.rpartition(".")[2]
        return OutputProjection(module, self.weight((name,), weight, bias), norm, factor)

    def post_norm(self, name: str, scale: float | None = None) -> RMSNorm:
        """Read the norm of an output, for such a stream."""
        config = self.config
        eps = config.norm_eps if config.post_norm_eps is None else config.post_norm_eps
        return RMSNorm(self.vector(name, config.hidden_size) * (config.residual_scale / (scale or self.scale)), eps)

    def vocabulary(self, name: str, rows: int, width: int | None = None, columns: Tensor | None = None) -> Weight:
        """Read a matrix with a row for each token, of the hidden size or another width, or some columns of it."""
        parts = self.vocabulary_parts(name, rows, width, columns)
        return self.make(parts, self.precision.logits_activation_bits, self.vocabulary_bias(name, rows), rows)

    def vocabulary_bias(self, name: str, rows: int) -> Tensor | None:
        """Read the bias of such a matrix; ``None`` if it has none."""
        return self.vector(f"{name}.bias", rows) if name == "lm_head" and self.config.lm_head_bias else None

    def vocabulary_parts(self, name: str, rows: int, width: int | None, columns: Tensor | None) -> Iterable[Unpacked]:
        """Return consecutive parts of such a matrix, see :meth:`vocabulary`."""
        parts = self.checkpoint.parts(name, rows, width or self.config.hidden_size)
        return parts if columns is None else (part.columns(columns) for part in parts)

    def pre_norm(self, name: str, scale: float | None = None, factor: float = 1.0) -> Norm:
        """Read the norm of the input of attention or MLP, for a model with such norms; see :meth:`norm`."""
        return self.norm(name, factor, scale) if self.config.has_pre_norms(split_name(name)[0]) else NoNorm()

    def norm(self, name: str, factor: float = 1.0, scale: float | None = None) -> Norm:
        """Read a norm of a stream that is ``scale`` times smaller than the model's; the output is times ``factor``."""
        config = self.config
        weight = torch.full((config.hidden_size,), factor, dtype=torch.float32, device=self.device)
        if config.norm_weights:
            weight = weight * self.vector(name, config.hidden_size)
        if config.norm == "layer_norm":
            bias = torch.zeros_like(weight)
            if config.norm_bias:
                bias = self.vector(f"{name}.bias", config.hidden_size) * factor
            return LayerNorm(weight, bias, config.norm_eps)
        return RMSNorm(weight, config.norm_eps / (scale or self.scale) ** 2)

    def heads_norm(self, name: str, size: int) -> RMSNorm:
        """Read a norm of all heads of a token together."""
        return RMSNorm(self.vector(name, size), self.config.norm_eps)

    def order_of_value_heads(self, sizes: LinearAttentionConfig) -> Tensor | None:
        """Return the order of the inputs that the output projection of linear attention reads; ``None`` for theirs."""
        if not sizes.tiled_output:
            return None
        # The projection's columns cannot change places within the blocks of a quantised row.
        return tiled_rows(sizes, sizes.value_dim).argsort().to(self.device)

    def vector(self, name: str, size: int) -> Tensor:
        """Read a vector, [size] fp32."""
        return self.checkpoint.vector(name, size).to(self.device)

    def layer_scale(self, index: int) -> float:
        """Read the factor of a layer's output; 1 for a model whose layers have none."""
        return float(self.vector(f"layers.{index}.layer_scale", 1)) if self.config.layer_scales else 1.0


def unquantized(reader: LayerReader, weight: Unpacked) -> Dense:
    """Return a matrix as it is, or in fp16 if it is quantised and may be rounded."""
    if isinstance(weight, Dense):
        return weight
    return Dense(weight.dequantize().to(torch.float32 if reader.precision.exact else torch.float16))
