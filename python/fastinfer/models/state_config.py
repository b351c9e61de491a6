"""Configuration of layers that have a state instead of keys and values."""

import math
from dataclasses import dataclass, replace

from typing_extensions import Self


@dataclass(frozen=True)
class LinearAttentionConfig:
    """The sizes of layers with linear attention.

    Attributes:
        num_key_heads, num_value_heads: number of query and key heads, and of value heads; equal groups of value heads
            share a key head.
        key_dim, value_dim: number of elements of a query or key, and of a value.
        kernel_size: number of tokens that the convolution before the delta rule sees.
        tiled_output: whether the inputs of the output projection are those of the first value head of every key head,
            then those of the second ones, and so on, as in GGUF files; else value heads of a key head are neighbours.
        separate_projections: whether queries, keys and values have a projection each.
        beta_scale: see :func:`fastinfer.ops.gated_delta_rule`.
        norm_eps: ``eps`` of the norm of each head's output; ``None`` for that of the other norms.
        channel_decay: whether each channel of a key has a decay of its own, instead of one for a head.
        decay_rank, gate_rank: number of elements between the two matrices of the projection of decays, and of the
            gate of the output; 0 for one matrix.
        sigmoid_gate, decay_bound: see :func:`fastinfer.ops.gated_delta_rule`.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel_size: int
    tiled_output: bool = False
    separate_projections: bool = False
    beta_scale: float = 1.0
    norm_eps: float | None = None
    channel_decay: bool = False
    decay_rank: int = 0
    gate_rank: int = 0
    sigmoid_gate: bool = False
    decay_bound: float = 0.0

    def with_channel_decays(self, rank: int) -> Self:
        """Return the sizes of Kimi Delta Attention: a decay for each channel, and a sigmoid as gate of the output.

        Args:
            rank: number of elements between the two matrices of the projections of decays and of the gate; 0 for one
                matrix each.
        """
        return replace(
            self, separate_projections=True, channel_decay=True, decay_rank=rank, gate_rank=rank, sigmoid_gate=True
        )

    @property
    def qkv_sizes(self) -> dict[str, int]:
        """Number of outputs of each projection of queries, keys and values, by its name."""
        if not self.separate_projections:
            return {"in_proj_qkv": self.conv_dim}
        keys = self.num_key_heads * self.key_dim
        return {"in_proj_q": keys, "in_proj_k": keys, "in_proj_v": self.value_size}

    @property
    def value_size(self) -> int:
        """Number of elements of all values of a token."""
        return self.num_value_heads * self.value_dim

    @property
    def conv_dim(self) -> int:
        """Number of elements of all queries, keys and values of a token."""
        return 2 * self.num_key_heads * self.key_dim + self.value_size

    @property
    def decay_size(self) -> int:
        """Number of decays of a token."""
        return self.num_value_heads * (self.key_dim if self.channel_decay else 1)

    @property
    def other_sizes(self) -> dict[str, int]:
        """Number of outputs of the other projections of a layer's input, by their names."""
        return {
            "in_proj_z": self.gate_rank or self.value_size,
            "in_proj_a": self.decay_rank or self.decay_size,
            "in_proj_b": self.num_value_heads,
        }

    @property
    def second_sizes(self) -> dict[str, tuple[int, int]]:
        """Numbers of inputs and outputs of the second matrices of projections, by their names."""
        sizes = {
            "in_proj_z_up": (self.gate_rank, self.value_size),
            "in_proj_a_up": (self.decay_rank, self.decay_size),
        }
        return {name: size for name, size in sizes.items() if size[0]}

    @property
    def input_size(self) -> int:
        """Number of outputs of the projections before the states."""
        return self.conv_dim + sum(self.other_sizes.values())

    @property
    def output_size(self) -> int:
        """Number of inputs of the output projection."""
        return self.value_size

    @property
    def recurrent_shape(self) -> tuple[int, int, int]:
        """Shape of the sums of the delta rule."""
        return self.num_value_heads, self.key_dim, self.value_dim

    def unsupported(self, key_dim: str, value_dim: str, kernel_size: str) -> str:
        """Return which size the operators do not support, by these names of sizes in a file; empty if there is none."""
        return _unsupported({key_dim: self.key_dim, value_dim: self.value_dim}, kernel_size, self.kernel_size)


@dataclass(frozen=True)
class ShortConvConfig:
    """The sizes of layers with a short convolution in the place of attention.

    Attributes:
        conv_dim: number of channels, the hidden size.
        kernel_size: number of tokens that the convolution sees.
        has_bias: whether the convolution and the projections before and after it have a bias.
    """

    conv_dim: int
    kernel_size: int
    has_bias: bool = False

    @property
    def input_size(self) -> int:
        """Number of outputs of the projection before the convolution."""
        return 3 * self.conv_dim

    @property
    def output_size(self) -> int:
        """Number of inputs of the output projection."""
        return self.conv_dim

    @property
    def recurrent_shape(self) -> None:
        """No state but the convolution's."""
        return None

    def unsupported(self, kernel_size: str) -> str:
        """Return which size the operators do not support, by this name of it in a file; empty if there is none."""
        return _unsupported({}, kernel_size, self.kernel_size)


@dataclass(frozen=True)
class Mamba2Config:
    """The sizes of Mamba-2 layers.

    Attributes:
        num_heads: number of heads.
        head_dim: number of elements of a head.
        state_dim: number of rows of a head's state.
        num_groups: number of groups of heads, which share b, c and a norm.
        kernel_size: number of tokens that the convolution before the scan sees.
        conv_bias: whether the convolution has a bias.
        projection_bias: whether the projections before and after it have a bias.
        dt_limits: least and largest time step.
        has_norm: whether the gated output is normalised.
        input_scale: factor of the input.
        conv_scales: factors of x, b and c before the convolution.
        dt_scale: factor of the time steps before their bias is added.
        output_scale: factor of the gated output.
    """

    num_heads: int
    head_dim: int
    state_dim: int
    num_groups: int
    kernel_size: int
    conv_bias: bool = True
    projection_bias: bool = False
    dt_limits: tuple[float, float] = (0.0, math.inf)
    has_norm: bool = True
    input_scale: float = 1.0
    conv_scales: tuple[float, float, float] = (1.0, 1.0, 1.0)
    dt_scale: float = 1.0
    output_scale: float = 1.0

    @property
    def inner_size(self) -> int:
        """Number of elements of all heads of a token."""
        return self.num_heads * self.head_dim

    @property
    def conv_dim(self) -> int:
        """Number of elements of x, b and c of a token."""
        return self.inner_size + 2 * self.num_groups * self.state_dim

    @property
    def input_size(self) -> int:
        """Number of outputs of the projection before the states."""
        return self.inner_size + self.conv_dim + self.num_heads

    @property
    def output_size(self) -> int:
        """Number of inputs of the output projection."""
        return self.inner_size

    @property
    def recurrent_shape(self) -> tuple[int, int, int]:
        """Shape of the states of all heads."""
        return self.num_heads, self.state_dim, self.head_dim

    def unsupported(self, head_dim: str, state_dim: str, kernel_size: str) -> str:
        """Return which size the operators do not support, by these names of sizes in a file; empty if there is none."""
        return _unsupported({head_dim: self.head_dim, state_dim: self.state_dim}, kernel_size, self.kernel_size)


StateConfig = LinearAttentionConfig | ShortConvConfig | Mamba2Config


def _unsupported(dims: dict[str, int], kernel_name: str, kernel_size: int) -> str:
    """Return which of these named sizes the operators do not support; empty if there is none."""
    for name, size in dims.items():
        if size % 16 or size > 256:
            return f"{name} must be a multiple of 16 up to 256, got {size}"
    if kernel_size not in (2, 3, 4, 7):
        return f"{kernel_name} must be from 2 to 4, or 7, got {kernel_size}"
    return ""
