"""Layer-by-layer quantisation, with calibration inputs that come from the layers already quantised, or without any.

The calibration text goes through the model once, as one ragged batch. The first product of a weight sees all its
calibration inputs at once: the weight quantises itself and computes the product with the result. Weights are thus
quantised in the order of their computation (QKV, output, gate and up, down: the "true sequential" order of GPTQ), and
only one layer's original weights are in memory at a time.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import Unpack

from fastinfer import ops
from fastinfer.formats.unpacked import Unpacked
from fastinfer.models.attention import Attention
from fastinfer.models.batch import Batch
from fastinfer.models.checkpoint import Checkpoint
from fastinfer.models.config import ModelConfig, Precision
from fastinfer.models.kv_cache import LayerCache, num_blocks_for
from fastinfer.models.latent_attention import LatentAttention, LatentPlan
from fastinfer.models.layer_reader import LayerReader
from fastinfer.models.loader import DecoderLoader
from fastinfer.models.state_cache import StateCache
from fastinfer.quantize.statistics import InputStatistics
from fastinfer.weights.expert_weights import ExpertWeights
from fastinfer.weights.weight import LinearOptions, Weight, apply_norm

BLOCK_SIZE = 32


@dataclass(eq=False)
class CalibratedWeight(Weight):
    """Weight that quantises itself in its first product, from the statistics of that product's inputs, or without.

    Attributes:
        names: names of the modules whose rows it holds, see :meth:`LayerReader.weight`.
        values: [out_features, in_features] fp32, the original weight until the first product, then what it is worth
            in products, quantised and times ``factor``.
        bias: [out_features] fp32.
        quantize: function of this weight and its input statistics, or ``None``, that sets ``result`` and perhaps
            ``input_scales``.
        factor: factor of the weight in its products.
        result: the quantised weight, for inputs divided by ``input_scales`` if they are set.
        input_scales: [in_features] fp32.
        error: relative error of the output in the Frobenius norm, ``||X(W - Q)|| / ||XW||``; without inputs that of
            the weight, ``||W - Q|| / ||W||``.
    """

    names: tuple[str, ...]
    values: Tensor
    bias: Tensor | None
    quantize: "Quantize"
    factor: float = 1.0
    result: Unpacked | None = None
    input_scales: Tensor | None = None
    error: float = 0.0

    @property
    def out_features(self) -> int:  # type: ignore[override]
        return self.values.shape[0]

    def linear(self, x: Tensor, **options: Unpack[LinearOptions]) -> Tensor:
        x = apply_norm(x, options)
        if self.result is None:
            statistics = InputStatistics.of(x)
            quantized = self._quantized(statistics)
            norm = statistics.output_error(self.values)
            self.error = _relative_error(statistics.output_error(quantized - self.values), norm)
            self.values = quantized.mul_(self.factor)
        return ops.gemm(x, self.values, bias=self.bias, **options)

    def quantize_without_inputs(self) -> None:
        """Quantise the weight by itself."""
        change = self._quantized(None) - self.values
        self.error = _relative_error(float(change.square().sum()), float(self.values.square().sum()))

    def _quantized(self, statistics: InputStatistics | None) -> Tensor:
        """Quantise the weight and return what it is then worth, for the original inputs."""
        self.quantize(self, statistics)
        assert self.result is not None
        values = self.result.dequantize()
        return values if self.input_scales is None else values / self.input_scales

    def rows(self, ids: Tensor | None, dtype: torch.dtype) -> Tensor:
        raise ValueError("a weight under calibration cannot be an embedding: call linear instead of rows")


def _relative_error(squared_error: float, squared_norm: float) -> float:
    """Return the quotient of two norms given their squares, of which rounding may leave a negative error."""
    return math.sqrt(max(squared_error, 0.0) / max(squared_norm, 1e-30))


@dataclass(eq=False)
class CalibratedExperts(ExpertWeights):
    """Weights of all experts, each of which quantises itself for the rows that the router gives it.

    An expert without rows is quantised without inputs.
    """

    experts: tuple[CalibratedWeight, ...]

    def linear(self, x: Tensor, routing: ops.Routing | ops.HeadRows, *, activation: str | None = None) -> Tensor:
        options: LinearOptions = {} if activation is None else {"activation": activation}
        out_features = self.experts[0].out_features // (1 if activation is None else 2)
        out = x.new_empty(len(routing.row_ids), out_features)
        row_ids = routing.row_ids.long().tensor_split(routing.expert_start[1:-1].long())
        for expert, rows in zip(self.experts, row_ids, strict=True):
            if len(rows):
                out[rows] = expert.linear(x[rows // (len(out) // len(x))], **options)
            else:
                expert.quantize_without_inputs()
        return out


Quantize = Callable[[CalibratedWeight, InputStatistics | None], None]


class _CalibratedReader(LayerReader):
    """Makes each weight of a layer a :class:`CalibratedWeight`, and keeps a list of them."""

    def __init__(self, checkpoint: Checkpoint, quantize: Quantize) -> None:
        super().__init__(checkpoint, Precision.of("float32"), "cpu")
        self._quantize = quantize
        self.waiting: list[CalibratedWeight] = []

    def weight(
        self,
        names: tuple[str, ...],
        unpacked: Unpacked,
        bias: Tensor | None,
        activation_bits: int | None = None,
        factor: float = 1.0,
    ) -> CalibratedWeight:
        weight = CalibratedWeight(names, unpacked.dequantize().contiguous(), bias, self._quantize, factor)
        self.waiting.append(weight)
        return weight

    def experts(self, names: list[tuple[str, ...]], unpacked: list[Unpacked], bias: Tensor | None) -> ExpertWeights:
        biases = [None] * len(names) if bias is None else list(bias)
        weights = (self.weight(*parts) for parts in zip(names, unpacked, biases, strict=True))
        return CalibratedExperts(tuple(weights))


@torch.inference_mode()
def calibrate(checkpoint: Checkpoint, texts: list[list[int]], quantize: Quantize) -> Iterator[list[CalibratedWeight]]:
    """Quantise a model layer by layer.

    Args:
        checkpoint: checkpoint with dense weights.
        texts: token ids of the calibration texts.
        quantize: function that sets the result of a weight, given the statistics of its inputs.

    Yields:
        The quantised weights of each layer, in the order of their computation, in a list that is emptied before the
        next layer is read.
    """
    config = checkpoint.config
    batch = Batch.of_texts(texts, BLOCK_SIZE)
    blocks = sum(num_blocks_for(len(text), BLOCK_SIZE) for text in texts)
    caches: dict[int, LayerCache | StateCache] = {}  # which other layers attend to
    reader = _CalibratedReader(checkpoint, quantize)
    loader = DecoderLoader(reader, max(map(len, texts)))
    x = loader.embedding().rows(batch.token_ids, torch.float32)
    if (norm := loader.embedding_norm()) is not None:
        x = norm(x)
    positions = loader.position_embedding()
    if positions is not None:
        x = ops.embedding(positions, batch.positions, x)
    make_inputs = loader.per_layer_inputs()
    inputs = None if make_inputs is None else make_inputs(x, batch.token_ids)
    before, chosen = x, None
    reader.waiting.clear()
    for index in range(config.num_layers):
        layer, source = loader.layer(index), config.kv_layer(index)
        attention = layer.attention
        plan = attention.plan(batch) if isinstance(attention, Attention | LatentAttention) else None
        if isinstance(plan, LatentPlan):
            plan.chosen = chosen  # by an earlier layer
        cache = caches.get(source)
        if cache is None:
            cache = _cache(config, index, blocks)
            if source in config.kv_layers[index + 1 :]:
                caches[source] = cache
        if not layer.shares_input:
            before = x  # the layer's input, which the next one may share
        x = layer(x, batch, cache, plan, None, None if inputs is None else inputs[:, index], before)
        if isinstance(plan, LatentPlan):
            chosen = plan.chosen
        del layer, attention  # whose weights nothing else needs
        yield reader.waiting
        reader.waiting.clear()
        checkpoint.release()


def _cache(config: ModelConfig, layer: int, blocks: int) -> LayerCache | StateCache:
    """Make the cache of a layer for texts whose states are not stored."""
    if config.has_state(layer):
        assert config.states is not None
        return StateCache.empty(config.states, 1, torch.float32, "cpu")
    cache = LayerCache.empty(config.kv_shape(layer), blocks, BLOCK_SIZE, torch.float32, "cpu")
    if config.indexer is not None and config.has_indexer(layer):
        return cache.with_index_keys(config.indexer.head_dim)
    return cache


def convert(checkpoint: Checkpoint, quantize: Quantize) -> Iterator[list[CalibratedWeight]]:
    """Quantise a model layer by layer, without any inputs.

    Args:
        checkpoint: checkpoint with dense weights.
        quantize: function that sets the result of a weight; it gets no statistics.

    Yields:
        The quantised weights of each layer, as :func:`calibrate` does.
    """
    reader = _CalibratedReader(checkpoint, quantize)
    loader = DecoderLoader(reader, 1)
    for index in range(checkpoint.config.num_layers):
        loader.layer(index)
        _quantize_without_inputs(reader.waiting)
        yield reader.waiting
        reader.waiting.clear()
        checkpoint.release()


def _quantize_without_inputs(weights: list[CalibratedWeight]) -> None:
    # A loop inside the generator would keep the last weight in memory while the next layer is read.
    for weight in weights:
        weight.quantize_without_inputs()
