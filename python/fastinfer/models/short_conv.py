"""Short convolution of one layer: norm + projection, convolution between two gates, output + residual."""

from dataclasses import dataclass

from torch import Tensor

from fastinfer import ops
from fastinfer.models.batch import Batch
from fastinfer.models.lora import LayerAdapters
from fastinfer.models.norm import Norm
from fastinfer.models.projection import OutputProjection
from fastinfer.models.state_cache import StateCache
from fastinfer.weights.weight import Weight


@dataclass(frozen=True, eq=False)
class ShortConv:
    """Convolution of each channel over the last few tokens, ``output(c * conv(b * x))``, as in LFM2.

    Source: ``Lfm2ShortConv`` of transformers.

    Attributes:
        norm: norm of the input.
        in_proj: [3 * hidden, hidden], projections of the gates b and c, and of x.
        conv_weight: [hidden, kernel_size] fp32.
        conv_bias: [hidden] fp32, or ``None``.
        output: projection back to the residual stream.
    """

    norm: Norm
    in_proj: Weight
    conv_weight: Tensor
    conv_bias: Tensor | None
    output: OutputProjection

    def __call__(self, residual: Tensor, batch: Batch, cache: StateCache, lora: LayerAdapters | None) -> Tensor:
        assert batch.state_reads is not None
        assert batch.state_writes is not None
        x, options = self.norm.before_linear(residual)
        rows, dim = self.in_proj.linear(x, **options), len(self.conv_weight)
        if lora is not None:
            lora.add("in_proj", rows, x, **options)
        slots = batch.query_start, batch.state_reads, batch.state_writes
        gates, x = rows[:, : 2 * dim], rows[:, 2 * dim :]
        out = ops.causal_conv1d(x, self.conv_weight, self.conv_bias, cache.conv, *slots, gates=gates)
        return self.output(out, residual, lora)
