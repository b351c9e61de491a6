"""Gated MLP module: two products, the first of which computes the activation, too."""

from torch import Tensor, nn
from typing_extensions import Unpack

from fastinfer.nn.linear import make_linear
from fastinfer.nn.merged_linear import merge_linears, name_rows
from fastinfer.weights.weight import NormOptions


class FusedMLP(nn.Module):
    """Gated MLP of Llama, Mistral, Qwen and Gemma: ``down_proj(activation(gate_proj(x)) * up_proj(x))``.

    The state dictionary keeps the names of the three original layers, whether dense or quantised.

    Args:
        gate_proj, up_proj: linear layers [hidden -> intermediate], with a multiple of 16 outputs each.
        down_proj: linear layer [intermediate -> hidden].
        activation: ``"silu"``, ``"gelu_tanh"`` or ``"gelu"``, see :mod:`fastinfer.ops.gemm`.
        quantize: a kind of :class:`QuantLinear`, or ``None`` for dense weights.
        group_size, activation_bits: see :class:`QuantLinear`.

    Raises:
        ValueError: the layers do not fit together, or no kernel supports them.
    """

    def __init__(
        self,
        gate_proj: nn.Linear,
        up_proj: nn.Linear,
        down_proj: nn.Linear,
        *,
        activation: str = "silu",
        quantize: str | None = None,
        group_size: int | None = None,
        activation_bits: int = 8,
    ) -> None:
        super().__init__()
        if activation not in ("silu", "gelu_tanh", "gelu"):
            raise ValueError(f"activation must be silu, gelu_tanh or gelu, got {activation!r}")
        self.activation = activation
        self.gate_up_proj = merge_linears([gate_proj, up_proj], True, quantize, group_size, activation_bits)
        self.down_proj = make_linear(down_proj, quantize, group_size, activation_bits)
        sizes = gate_proj.out_features, up_proj.out_features
        name_rows(self, "gate_up_proj", ("gate_proj", "up_proj"), sizes, interleaved=True)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the MLP of [..., hidden]."""
        return self.transform(x.reshape(-1, x.shape[-1])).view(x.shape)

    def transform(self, x: Tensor, residual: Tensor | None = None, **norm: Unpack[NormOptions]) -> Tensor:
        """Compute the MLP of [tokens, hidden], with an optional norm before and sum after it."""
        hidden = self.gate_up_proj(x, activation=self.activation, **norm)
        out: Tensor = self.down_proj(hidden, residual=residual)
        return out

    def extra_repr(self) -> str:
        return f"activation={self.activation}"
