"""Reading of the fields of config.json that only Kimi Linear has, as ``KimiLinearConfig`` of transformers does."""

from dataclasses import replace

from fastinfer.errors import CheckpointFormatError
from fastinfer.formats.json_fields import JsonFields
from fastinfer.models.config import MAX_LAYERS, ModelConfig
from fastinfer.models.hf_fields import Sizes
from fastinfer.models.hf_states import FULL
from fastinfer.models.state_config import LinearAttentionConfig

LINEAR = "linear_attention"
# Sizes of linear attention, with their names in published files, which have them in an object of their own.
_SIZES = {
    "linear_head_dim": "head_dim",
    "linear_num_heads": "num_heads",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
}


def prepare_kimi_linear(fields: JsonFields) -> None:
    """Add the kinds of the layers, and the sizes of linear attention by their usual names."""
    published = fields.object("linear_attn_config")
    if published is not None:
        own = {usual: published.values[name] for usual, name in _SIZES.items() if name in published.values}
        fields.values |= own
    if not fields.get("layer_types", list, []):
        fields.values["layer_types"] = _kinds(fields, published)
    size = Sizes(fields)
    heads, dim = size("linear_num_heads"), size("linear_head_dim")
    fields.values |= {
        "linear_num_key_heads": heads,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": dim,
        "linear_value_head_dim": dim,
    }


def kimi_linear_config(fields: JsonFields, config: ModelConfig) -> ModelConfig:
    """Return the configuration with decays of channels, and without rotations."""
    states = config.states
    assert isinstance(states, LinearAttentionConfig)
    return replace(
        config,
        states=states.with_channel_decays(states.key_dim),
        unrotated_layers=frozenset(range(config.num_layers)),
    )


def _kinds(fields: JsonFields, published: JsonFields | None) -> list[object]:
    """Return the kinds of layers, which published files have as the numbers of the layers of each kind, from 1 on."""
    count = fields.get("num_hidden_layers", int, minimum=1, maximum=MAX_LAYERS)
    names = {"full_attn_layers": FULL, "kda_layers": LINEAR}
    if published is None or not all(name in published.values for name in names):
        return [LINEAR if layer % 4 or layer == 0 else FULL for layer in range(count)]
    numbers = {name: published.get(name, list) for name in names}
    listed = sorted(repr(number) for each in numbers.values() for number in each)
    if listed != sorted(map(repr, range(1, count + 1))):
        raise CheckpointFormatError(
            f"{fields.path}: linear_attn_config: full_attn_layers and kda_layers: expected each of 1..{count} once, "
            f"got {list(numbers.values())!r:.80}"
        )
    kinds = {number: kind for name, kind in names.items() for number in numbers[name]}
    return [kinds[layer + 1] for layer in range(count)]
