"""Layers that have a state instead of keys and values, from ``config.json``."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fastinfer.errors import CheckpointFormatError, UnsupportedModelError
from fastinfer.formats.json_fields import JsonFields
from fastinfer.models.hf_fields import Sizes, require
from fastinfer.models.state_config import LinearAttentionConfig, Mamba2Config, ShortConvConfig

FULL, SLIDING, CONV = "full_attention", "sliding_attention", "conv"
MAMBA = "linear_attention"  # as transformers has named them since version 5


def linear_attention(fields: JsonFields, size: Sizes) -> LinearAttentionConfig:
    """Return the sizes of the layers with linear attention, which must be those that the operators support."""
    require(fields, "hidden_act", "silu")  # the activation of the convolution, too
    # Files since Qwen3.6 name the activation of the gate. transformers takes the same one whatever they say.
    if fields.values.get("output_gate_type") != "swish":  # another name of it
        require(fields, "output_gate_type", "silu")
    sizes = LinearAttentionConfig(
        num_key_heads=size("linear_num_key_heads"),
        num_value_heads=size("linear_num_value_heads"),
        key_dim=size("linear_key_head_dim"),
        value_dim=size("linear_value_head_dim"),
        kernel_size=size("linear_conv_kernel_dim"),
    )
    if sizes.num_value_heads % sizes.num_key_heads:
        raise CheckpointFormatError(
            f"{fields.path}: linear_num_value_heads: expected a multiple of {sizes.num_key_heads}, "
            f"got {sizes.num_value_heads}"
        )
    if problem := sizes.unsupported("linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim"):
        raise UnsupportedModelError(f"{fields.path}: {problem}")
    return sizes


def short_conv_layers(fields: JsonFields, num_layers: int, others: Sequence[str]) -> tuple[bool, ...]:
    """Return whether each layer of LFM2 and LFM3 has a short convolution; ``others``: the other kinds of layers."""
    listed = fields.get("full_attn_idxs", list, [])
    default: list[object] = [FULL if layer in listed else CONV for layer in range(num_layers)]
    return layers_of_kind(fields, CONV, fields.get("layer_types", list, default), num_layers, others)


def short_conv(fields: JsonFields, size: Sizes) -> ShortConvConfig:
    """Return the sizes of these layers, which must be those that the operators support."""
    for key in ("use_pos_enc", "block_use_swiglu"):  # of the first published files, which transformers does not read
        require(fields, key, True)
    sizes = ShortConvConfig(size("hidden_size"), size("conv_L_cache"), fields.get("conv_bias", bool, False))
    if problem := sizes.unsupported("conv_L_cache"):
        raise UnsupportedModelError(f"{fields.path}: {problem}")
    return sizes


def adjusted_intermediate_size(fields: JsonFields, size: Sizes) -> int:
    """Return the width of the dense MLP of LFM2, which may be given as another number that it follows from."""
    width = size("block_ff_dim", 0) or size("intermediate_size")
    if not fields.get("block_auto_adjust_ff_dim", bool, False):
        return width
    factor = fields.get("block_ffn_dim_multiplier", float, minimum=1e-3, maximum=1e3)
    multiple = size("block_multiple_of")
    return -(-int(factor * int(2 * width / 3)) // multiple) * multiple


def prepare_granite_hybrid(fields: JsonFields) -> None:
    """Give the fields of Granite 4 the names and meanings that those of other families have.

    Without experts, the MLP is the expert that all tokens have besides their own.
    """
    require(fields, "normalization_function", "rmsnorm")
    kinds = fields.get("layer_types", list, None) or fields.get("layers_block_type", list, None) or []
    names = {"mamba": MAMBA, "attention": FULL}
    changed: dict[str, object] = {"layer_types": [names.get(str(kind), kind) for kind in kinds]}
    if not fields.get("num_local_experts", int, minimum=0):
        changed["intermediate_size"] = fields.get("shared_intermediate_size", int)
        changed |= {"shared_intermediate_size": 0, "num_local_experts": None}
    fields.values |= changed


def is_rotated(fields: JsonFields) -> bool:
    """Return whether the queries and keys of Granite 4 are rotated."""
    kind = fields.get("position_embedding_type", str, "nope")
    if kind not in ("nope", "rope"):
        raise UnsupportedModelError(f"{fields.path}: position_embedding_type must be nope or rope, got {kind!r:.80}")
    return kind == "rope"


def mamba_layers(fields: JsonFields, num_layers: int) -> tuple[bool, ...]:
    """Return whether each layer of Granite 4, Nemotron-H or Falcon-H1 is of Mamba-2; empty if none is."""
    kinds = fields.get("layer_types", list) or [MAMBA] * num_layers
    if kinds == [FULL] * num_layers:
        return ()
    return layers_of_kind(fields, MAMBA, kinds, num_layers)


@dataclass(frozen=True)
class Mamba2Names:
    """The names that config.json of a family has for the sizes of Mamba-2 layers; see Mamba2Config."""

    num_heads: str
    head_dim: str
    state_dim: str
    num_groups: str
    kernel_size: str
    conv_bias: str
    projection_bias: str


MAMBA_NAMES = Mamba2Names(
    num_heads="mamba_n_heads",
    head_dim="mamba_d_head",
    state_dim="mamba_d_state",
    num_groups="mamba_n_groups",
    kernel_size="mamba_d_conv",
    conv_bias="mamba_conv_bias",
    projection_bias="mamba_proj_bias",
)


def granite_mamba2(fields: JsonFields, size: Sizes) -> Mamba2Config:
    """Return the sizes of the Mamba-2 layers of Granite 4."""
    require(fields, "hidden_act", "silu")  # the activation of the convolution, too
    inner = size("mamba_expand") * size("hidden_size")
    head_dim = mamba_head_dim(fields, size, "mamba_expand * hidden_size", inner)
    return mamba2(fields, size, MAMBA_NAMES, head_dim, dt_limits(fields))


def mamba_head_dim(fields: JsonFields, size: Sizes, name: str, inner: int) -> int:
    """Return the number of elements of a head, of which ``inner`` are in all heads; ``name`` is the name of that."""
    heads = size(MAMBA_NAMES.num_heads)
    if inner % heads:
        raise CheckpointFormatError(f"{fields.path}: {name}: expected a multiple of {heads}, got {inner}")
    if fields.values.get(MAMBA_NAMES.head_dim) not in (None, "auto", inner // heads):
        raise CheckpointFormatError(
            f"{fields.path}: mamba_d_head: expected {inner // heads}, got {fields.values['mamba_d_head']!r:.80}"
        )
    return inner // heads


def mamba2(
    fields: JsonFields, size: Sizes, names: Mamba2Names, head_dim: int, dt_limits: tuple[float, float]
) -> Mamba2Config:
    """Return the sizes of Mamba-2 layers, which must be those that the operators support."""
    heads, groups = size(names.num_heads), size(names.num_groups)
    if heads % groups:
        raise CheckpointFormatError(f"{fields.path}: {names.num_heads}: expected a multiple of {groups}, got {heads}")
    sizes = Mamba2Config(
        num_heads=heads,
        head_dim=head_dim,
        state_dim=size(names.state_dim),
        num_groups=groups,
        kernel_size=size(names.kernel_size),
        conv_bias=fields.get(names.conv_bias, bool),
        projection_bias=fields.get(names.projection_bias, bool),
        dt_limits=dt_limits,
    )
    if problem := sizes.unsupported(names.head_dim, names.state_dim, names.kernel_size):
        raise UnsupportedModelError(f"{fields.path}: {problem}")
    return sizes


def dt_limits(fields: JsonFields) -> tuple[float, float]:
    """Return the least and the largest time step, which may be infinite."""
    limits = fields.get("time_step_limit", list, [0.0, math.inf])
    infinity = {"__float__": "Infinity"}  # as transformers writes it
    values = [math.inf if limit == infinity else limit for limit in limits]
    numbers = [float(value) for value in values if type(value) in (int, float)]
    if len(numbers) != 2 or len(limits) != 2 or not 0 <= numbers[0] <= numbers[1]:
        raise CheckpointFormatError(
            f"{fields.path}: time_step_limit: expected two numbers in ascending order from 0, got {limits!r:.80}"
        )
    return numbers[0], numbers[1]


def layers_of_kind(
    fields: JsonFields, kind: str, kinds: Sequence[object], num_layers: int, others: Sequence[str] = (FULL,)
) -> tuple[bool, ...]:
    """Return which layers are of this kind; the others have attention, and there must be some of both.

    Raises:
        CheckpointFormatError: ``layer_types`` has another length or other entries.
        UnsupportedModelError: all layers are of the same kind.
    """
    if len(kinds) != num_layers or not all(each in (kind, *others) for each in kinds):
        names = " and ".join((kind, *others))
        raise CheckpointFormatError(f"{fields.path}: layer_types: expected {num_layers} of {names}, got {kinds!r:.80}")
    for group in ((kind,), others):
        if not any(each in kinds for each in group):
            name = " or ".join(group)
            raise UnsupportedModelError(f"{fields.path}: layer_types: expected at least one {name}, got none")
    return tuple(each == kind for each in kinds)
