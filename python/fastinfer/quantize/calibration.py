"""Quantises a model layer by layer: every weight sees what the layers before it, already quantised, make of a text.

The text goes through the model once, as one ragged batch. A weight that is asked for its first product has all its
calibration inputs before it: it quantises itself, and answers with the result. So each layer is quantised in the order
in which it computes (QKV, output, gate and up, down: the "true sequential" order of GPTQ), and only one layer's
original weights are in memory at a time.
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
from fastinfer.weights.weight import LinearOptions, Weight, normalized

BLOCK_SIZE = 32


@dataclass(eq=False)
class Calibrated(Weight):
    """A weight that waits for its calibration inputs.

    Attributes:
        names: whose rows it holds, see :meth:`DecoderLoader.weight`.
        values: [out_features, in_features] fp32.
        bias: [out_features] fp32.
        quantize: from this and the statistics of its inputs to the result, and the values that it stands for.
        result: the quantised weight; of the inputs divided by ``input_scales``, if there are any.
        input_scales: [in_features].
        error: mean squared error of the output, relative to its mean square.
    """

    names: tuple[str, ...]
    values: Tensor
    bias: Tensor | None
    quantize: Callable[["Calibrated", InputStatistics], None]
    result: Unpacked | None = None
    input_scales: Tensor | None = None
    error: float = 0.0
    _effective: Tensor | None = field(default=None, init=False)

    @property
    def out_features(self) -> int:  # type: ignore[override]
        return self.values.shape[0]

    def linear(self, x: Tensor, **options: Unpack[LinearOptions]) -> Tensor:
        x = normalized(x, options)
        if self._effective is None:
            statistics = InputStatistics.of(x)
            self.quantize(self, statistics)
            assert self.result is not None
            values = self.result.dequantize()
            self._effective = values if self.input_scales is None else values / self.input_scales
            change = self._effective - self.values
            self.error = statistics.output_error(change) / max(statistics.output_error(self.values.clone()), 1e-30)
        return ops.gemm(x, self._effective, bias=self.bias, **options)

    def rows(self, ids: Tensor | None, dtype: torch.dtype) -> Tensor:
        raise ValueError("a weight under calibration is no embedding")


class _CalibratedLoader(DecoderLoader):
    """Builds layers of weights that wait for their inputs."""

    def __init__(
        self, checkpoint: Checkpoint, length: int, quantize: Callable[[Calibrated, InputStatistics], None]
    ) -> None:
        super().__init__(checkpoint, Precision.of("float32"), length, "cpu")
        self._quantize = quantize
        self.waiting: list[Calibrated] = []

    def weight(self, names: tuple[str, ...], unpacked: Unpacked, bias: Tensor | None) -> Weight:
        weight = Calibrated(names, unpacked.dequantize(), bias, self._quantize)
        self.waiting.append(weight)
        return weight


@torch.inference_mode()
def calibrate(
    checkpoint: Checkpoint,
    texts: list[list[int]],
    quantize: Callable[[Calibrated, InputStatistics], None],
) -> Iterator[list[Calibrated]]:
    """Quantise layer after layer.

    Args:
        checkpoint: of dense weights.
        texts: token ids of the calibration texts.
        quantize: sets the result of a weight, given the statistics of its inputs.

    Yields:
        The quantised weights of each layer, in the order in which they compute.
    """
    config = checkpoint.config
    batch = Batch.of_texts(texts, BLOCK_SIZE)
    blocks = sum(num_blocks_for(len(text), BLOCK_SIZE) for text in texts)
    sizes = BLOCK_SIZE, config.num_kv_heads, config.head_dim, torch.float32, "cpu"
    (cache,) = KVCache.empty(1, blocks, *sizes)
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
