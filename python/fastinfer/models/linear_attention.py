"""Linear attention of one layer: norm + projections, convolution, gated delta rule, output + residual."""

from dataclasses import dataclass

from torch import Tensor

from fastinfer import ops
from fastinfer.models.batch import Batch
from fastinfer.models.lora import LayerAdapters
from fastinfer.models.norm import Norm
from fastinfer.models.projection import OutputProjection
from fastinfer.models.state_cache import StateCache
from fastinfer.models.state_config import LinearAttentionConfig
from fastinfer.weights.weight import Weight


@dataclass(frozen=True, eq=False)
class LinearAttention:
    """Gated delta net, whose state has the same size at any length; as in Qwen3-Next, Qwen3.5 and OLMo Hybrid.

    With a decay for each channel it is Kimi Delta Attention.

    Source: Yang et al., 2024, https://arxiv.org/abs/2412.06464; ``Qwen3_5GatedDeltaNet`` and
    ``KimiLinearDeltaAttention`` of transformers.

    Attributes:
        sizes: sizes of the layer.
        norm: norm of the input.
        qkvz: projections of queries, keys, values and of the gate of the output, with their rows concatenated.
        gate_up: second matrix of the projection of that gate, or ``None`` for a single one.
        head_gates: projections of how much each head, or each of its channels, forgets before a token, and of how much
            of the token it stores, with their rows concatenated.
        decay_up: second matrix of the first of these projections, or ``None`` for a single one.
        conv_weight: [conv_dim, kernel_size] fp32, the filters of queries, keys and values.
        a_log, dt_bias: [num_value_heads] and [decay_size] fp32; constants of how much each head forgets.
        gated_norm: [value_dim] fp32, weight of the norm of each head's output.
        gated_norm_eps: ``eps`` of that norm.
        output: projection back to the residual stream.
    """

    sizes: LinearAttentionConfig
    norm: Norm
    qkvz: Weight
    gate_up: Weight | None
    head_gates: Weight
    decay_up: Weight | None
    conv_weight: Tensor
    a_log: Tensor
    dt_bias: Tensor
    gated_norm: Tensor
    gated_norm_eps: float
    output: OutputProjection

    def __call__(self, residual: Tensor, batch: Batch, cache: StateCache, lora: LayerAdapters | None) -> Tensor:
        assert batch.state_reads is not None
        assert batch.state_writes is not None
        assert cache.recurrent is not None
        sizes, slots = self.sizes, (batch.query_start, batch.state_reads, batch.state_writes)
        x, options = self.norm.before_linear(residual)
        gate_size, *head_sizes = sizes.other_sizes.values()
        qkv, z = self.qkvz.split_linear(x, [sizes.conv_dim, gate_size], **options)
        a, b = self.head_gates.split_linear(x, head_sizes, **options)
        if lora is not None:
            projected = zip(sizes.qkv_sizes, qkv.split(list(sizes.qkv_sizes.values()), 1), strict=True)
            for name, part in (*projected, ("in_proj_z", z), ("in_proj_a", a), ("in_proj_b", b)):
                lora.add(name, part, x, **options)
        z = _second(self.gate_up, z, "in_proj_z_up", lora)
        a = _second(self.decay_up, a, "in_proj_a_up", lora)
        qkv = ops.causal_conv1d(qkv, self.conv_weight, None, cache.conv, *slots)
        out = ops.gated_delta_rule(
            qkv,
            z,
            a,
            b,
            self.a_log,
            self.dt_bias,
            self.gated_norm,
            self.gated_norm_eps,
            cache.recurrent,
            *slots,
            sizes.beta_scale,
            sizes.sigmoid_gate,
            sizes.decay_bound,
        )
        return self.output(out, residual, lora)


def _second(weight: Weight | None, x: Tensor, name: str, lora: LayerAdapters | None) -> Tensor:
    """Return the product with the second matrix of a projection, or the first one's result if there is none."""
    if weight is None:
        return x
    out = weight.linear(x)
    if lora is not None:
        lora.add(name, out, x)
    return out
