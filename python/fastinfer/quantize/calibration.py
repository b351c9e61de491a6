"""Layer-by-layer quantisation, with calibration inputs that come from the layers already quantised, or without any.

The calibration text goes through the model once, as one ragged batch. The first product of a weight sees all its
calibration inputs at once: the weight quantises itself and computes the product with the result. Weights are thus
quantised in the order of their computation (QKV, output, gate and up, down: the "true sequential" order of GPTQ), and
only one layer's original weights are in memory at a time.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from typing_extensions import Unpack

from fastinfer import ops
from fastinfer.formats.unpacked import Unpacked
from fastinfer.models.batch import Batch
from fastinfer.models.checkpoint import Checkpoint
from fastinfer.models.config import Precision
from fastinfer.models.kv_cache import KVCache, num_blocks_for
from fastinfer.models.loader import DecoderLoader
from fastinfer.quantize.statistics import InputStatistics
from fastinfer.weights.weight import LinearOptions, Weight, apply_norm

BLOCK_SIZE = 32


@dataclass(eq=False)
class CalibratedWeight(Weight):
    """Weight that quantises itself in its first product, from the statistics of that product's inputs, or without.

    Attributes:
        names: names of the modules whose rows it holds, see :meth:`DecoderLoader.weight`.
        values: [out_features, in_features] fp32, the original weight.
        bias: [out_features] fp32.
        quantize: function of this weight and its input statistics, or ``None``, that sets ``result`` and perhaps
            ``input_scales``.
        result: the quantised weight, for inputs divided by ``input_scales`` if they are set.
        input_scales: [in_features] fp32.
        error: mean squared error of the output, relative to the output's mean square; without inputs that of the
            weight.
    """

    names: tuple[str, ...]
    values: Tensor
    bias: Tensor | None
    quantize: "Quantize"
    result: Unpacked | None = None
    input_scales: Tensor | None = None
    error: float = 0.0
    _effective: Tensor | None = field(default=None, init=False)

    @property
    def out_features(self) -> int:  # type: ignore[override]
        return self.values.shape[0]

    def linear(self, x: Tensor, **options: Unpack[LinearOptions]) -> Tensor:
        x = apply_norm(x, options)
        if self._effective is None:
            statistics = InputStatistics.of(x)
            self._effective = self._quantized(statistics)
            change = self._effective - self.values
            self.error = statistics.output_error(change) / max(statistics.output_error(self.values.clone()), 1e-30)
        return ops.gemm(x, self._effective, bias=self.bias, **options)

    def quantize_without_inputs(self) -> None:
        """Quantise the weight by itself."""
        change = self._quantized(None) - self.values
        self.error = float(change.square().sum()) / max(float(self.values.square().sum()), 1e-30)

    def _quantized(self, statistics: InputStatistics | None) -> Tensor:
        """Quantise the weight and return what it is then worth, for the original inputs."""
        self.quantize(self, statistics)
        assert self.result is not None
        values = self.result.dequantize()
        return values if self.input_scales is None else values / self.input_scales

    def rows(self, ids: Tensor | None, dtype: torch.dtype) -> Tensor:
        raise ValueError("a weight under calibration cannot be an embedding: call linear instead of rows")


Quantize = Callable[[CalibratedWeight, InputStatistics | None], None]


class _CalibratedLoader(DecoderLoader):
    """Builds layers whose weights are :class:`CalibratedWeight`, and keeps a list of them."""

    def __init__(self, checkpoint: Checkpoint, length: int, quantize: Quantize) -> None:
        super().__init__(checkpoint, Precision.of("float32"), length, "cpu")
        self._quantize = quantize
        self.waiting: list[CalibratedWeight] = []

    def weight(self, names: tuple[str, ...], unpacked: Unpacked, bias: Tensor | None) -> Weight:
        weight = CalibratedWeight(names, unpacked.dequantize(), bias, self._quantize)
        self.waiting.append(weight)
        return weight


@torch.inference_mode()
def calibrate(checkpoint: Checkpoint, texts: list[list[int]], quantize: Quantize) -> Iterator[list[CalibratedWeight]]:
    """Quantise a model layer by layer.

    Args:
        checkpoint: checkpoint with dense weights.
        texts: token ids of the calibration texts.
        quantize: function that sets the result of a weight, given the statistics of its inputs.

    Yields:
        The quantised weights of each layer, in the order of their computation.
    """
    config = checkpoint.config
    batch = Batch.of_texts(texts, BLOCK_SIZE)
    blocks = sum(num_blocks_for(len(text), BLOCK_SIZE) for text in texts)
    sizes = BLOCK_SIZE, config.num_kv_heads, config.head_dim, torch.float32, "cpu"
    (cache,) = KVCache.empty([0], [blocks], *sizes)
    loader = _CalibratedLoader(checkpoint, max(map(len, texts)), quantize)
    x = loader.embedding().rows(batch.token_ids, torch.float32)
    positions = loader.position_embedding()
    if positions is not None:
        x = ops.embedding(positions, batch.positions, x)
    for index in range(config.num_layers):
        loader.waiting.clear()
        layer = loader.layer(index)
        x = layer.attention(x, batch, cache, layer.attention.plan(batch), None)
        x = layer.mlp(x, None)
        yield list(loader.waiting)
        checkpoint.release()


def convert(checkpoint: Checkpoint, quantize: Quantize) -> Iterator[list[CalibratedWeight]]:
    """Quantise a model layer by layer, without any inputs.

    Args:
        checkpoint: checkpoint with dense weights.
        quantize: function that sets the result of a weight; it gets no statistics.

    Yields:
        The quantised weights of each layer.
    """
    loader = _CalibratedLoader(checkpoint, 1, quantize)
    for index in range(checkpoint.config.num_layers):
        loader.waiting.clear()
        loader.layer(index)
        for weight in loader.waiting:
            weight.quantize_without_inputs()
        yield list(loader.waiting)
        checkpoint.release()
