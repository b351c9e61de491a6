"""Reading of the fields of config.json that only MiMo-V2-Flash has."""

from dataclasses import replace

from fastinfer.errors import CheckpointFormatError, UnsupportedModelError
from fastinfer.formats.json_fields import JsonFields
from fastinfer.models.config import MAX_LAYERS, MAX_SIZE, KVShape, ModelConfig
from fastinfer.models.hf_states import FULL, SLIDING

# What its program takes where the file does not say it. It does not read the names that published files have instead.
_ROPE = {
    FULL: {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.334},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.334},
}


def prepare_mimo(fields: JsonFields) -> None:
    """Add the kinds of the layers and the rotary settings of each kind if the file does not say them.

    Raises:
        CheckpointFormatError: the rotary settings are not those of each kind.
    """
    count = fields.get("num_hidden_layers", int, minimum=1, maximum=MAX_LAYERS)
    values = dict(fields.values)
    if not fields.get("layer_types", list, []):
        values["layer_types"] = [FULL if i == 0 or (i + 1) % 6 == 0 else SLIDING for i in range(count)]
    if (length := fields.get("sliding_window_size", int, None, minimum=1)) is not None:
        values["sliding_window"] = length + 1  # tokens before that of the query
    rope = fields.object("rope_parameters")
    if rope is None:
        values["rope_parameters"] = _ROPE
    elif missing := [kind for kind in (FULL, SLIDING) if kind in values["layer_types"] and rope.object(kind) is None]:
        raise CheckpointFormatError(f"{fields.path}: rope_parameters.{missing[0]} is missing")
    fields.values = values


def mimo_config(fields: JsonFields, config: ModelConfig) -> ModelConfig:
    """Return the configuration with the heads of layers with a window, and the sizes and the factor of values."""
    value_dim = fields.get("v_head_dim", int, minimum=1, maximum=MAX_SIZE)
    if value_dim > config.head_dim:
        raise UnsupportedModelError(
            f"{fields.path}: v_head_dim must be at most head_dim = {config.head_dim}, got {value_dim}"
        )
    local = 2 * config.num_kv_heads
    if any(config.windows) and config.num_heads % local:
        raise CheckpointFormatError(
            f"{fields.path}: expected a multiple of {local} query heads, which layers with a window need, "
            f"got {config.num_heads}"
        )
    return replace(
        config,
        kv_shapes=tuple(
            KVShape(local if window else config.num_kv_heads, config.head_dim) for window in config.windows
        ),
        value_dim=0 if value_dim == config.head_dim else value_dim,
        value_scale=fields.get("attention_value_scale", float, 1.0, minimum=1e-6, maximum=1e6),
        full_sinks=False,
    )
