"""Mamba-2 layer: norm + projections, convolution, selective state space model, output + residual."""

from dataclasses import dataclass

from torch import Tensor

from fastinfer import ops
from fastinfer.models.batch import Batch
from fastinfer.models.lora import LayerAdapters
from fastinfer.models.norm import Norm
from fastinfer.models.projection import OutputProjection
from fastinfer.models.state_cache import StateCache
from fastinfer.models.state_config import Mamba2Config
from fastinfer.weights.weight import Weight


@dataclass(frozen=True, eq=False)
class Mamba2:
    """Selective state space model, whose state has the same size at any length; as in Granite 4.

    Factors of x, b, c, the time steps and the output are part of the weights.

    Source: Dao and Gu, 2024, https://arxiv.org/abs/2405.21060; ``GraniteMoeHybridMambaLayer`` of transformers.

    Attributes:
        sizes: sizes of the layer.
        norm: norm of the input.
        zxbc: projections of the gate of the output and of x, b and c, with their rows concatenated.
        dt: [num_heads, hidden]; projection of the time steps.
        conv_weight: [conv_dim, kernel_size] fp32, the filters of x, b and c.
        conv_bias: [conv_dim] fp32, or ``None``.
        a_log, dt_bias, d: [num_heads] fp32; logarithm of the rate of decay, bias of the time step, and factor of x in
            the output.
        gated_norm: [inner_size] fp32, weight of the norm of each group of heads; ``None`` for no norm.
        gated_norm_eps: ``eps`` of that norm.
        output: projection back to the residual stream.
    """

    sizes: Mamba2Config
    norm: Norm
    zxbc: Weight
    dt: Weight
    conv_weight: Tensor
    conv_bias: Tensor | None
    a_log: Tensor
    dt_bias: Tensor
    d: Tensor
    gated_norm: Tensor | None
    gated_norm_eps: float
    output: OutputProjection

    def __call__(self, residual: Tensor, batch: Batch, cache: StateCache, lora: LayerAdapters | None) -> Tensor:
        assert batch.state_reads is not None
        assert batch.state_writes is not None
        assert cache.recurrent is not None
        sizes, slots = self.sizes, (batch.query_start, batch.state_reads, batch.state_writes)
        x, options = self.norm.before_linear(residual)
        zxbc, dt = self.zxbc.linear(x, **options), self.dt.linear(x, **options)
        if lora is not None:
            lora.add("in_proj", zxbc, x, **options)
            lora.add("in_proj_dt", dt, x, **options)
        z, xbc = zxbc.split([sizes.inner_size, sizes.conv_dim], dim=-1)
        xbc = ops.causal_conv1d(xbc, self.conv_weight, self.conv_bias, cache.conv, *slots)
        out = ops.mamba2_scan(
            xbc,
            z,
            dt,
            self.a_log,
            self.dt_bias,
            self.d,
            self.gated_norm,
            self.gated_norm_eps,
            *sizes.dt_limits,
            cache.recurrent,
            *slots,
        )
        return self.output(out, residual, lora)
