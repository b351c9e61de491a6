"""Reading of the fields of config.json that only Step 3.5 and Step 3.7 have."""

from typing import Any

from fastinfer.errors import CheckpointFormatError, UnsupportedModelError
from fastinfer.formats.json_fields import JsonFields
from fastinfer.models.config import MAX_LAYERS, MAX_SIZE, ModelConfig
from fastinfer.models.hf_fields import swiglu_limits
from fastinfer.models.hf_layers import require_window
from fastinfer.models.hf_states import FULL, SLIDING
from fastinfer.models.layer_values import with_heads, with_swiglu_limits

# Lists that may go on with the layers that predict later tokens.
_LISTS = (
    *("layer_types", "mlp_layer_types", "swiglu_limits", "swiglu_limits_shared"),
    *("rope_theta", "partial_rotary_factors"),
)
_WINDOWED = "attention_other_setting"
_DENSE_LAYERS = 3  # in files that do not say which layers have experts


def prepare_step(fields: JsonFields) -> None:
    """Add the kinds of the layers and of their MLPs, and the rotary settings of each kind of layer.

    Raises:
        CheckpointFormatError: a list does not have a value for each layer, or a value is out of range.
        UnsupportedModelError: layers with a window have another number of KV heads or size of heads.
    """
    values = dict(fields.values)
    count = fields.get("num_hidden_layers", int, minimum=1, maximum=MAX_LAYERS)
    for key in _LISTS:
        listed = values.get(key)
        if isinstance(listed, list):
            if len(listed) < count:
                raise CheckpointFormatError(f"{fields.path}: {key}: expected {count} values, got {listed!r:.80}")
            values[key] = listed[:count]
    kinds = values["layer_types"] = values.get("layer_types") or [FULL] * count
    require_window(JsonFields(fields.path, values, fields.error))
    if not values.get("mlp_layer_types"):
        sparse = _sparse_layers(fields, count)
        values["mlp_layer_types"] = ["sparse" if layer in sparse else "dense" for layer in range(count)]
    _check_windowed_layers(fields)
    if values.get("query_pre_attn_scalar") is None:
        values["query_pre_attn_scalar"] = values["head_dim"]
    values["rope_parameters"] = _rope_parameters(JsonFields(fields.path, values, fields.error), kinds)
    # Which are part of those now.
    fields.values = values | {"rope_theta": None, "partial_rotary_factors": None, "rope_scaling": None}


def step_config(fields: JsonFields, config: ModelConfig) -> ModelConfig:
    """Return the configuration with the numbers of query heads and the limits of SwiGLU, which differ by layer."""
    windowed = fields.get("num_sliding_attention_heads", int, 0, minimum=1, maximum=MAX_SIZE)
    other = fields.object(_WINDOWED)
    if not windowed and other is not None:
        windowed = other.get("num_attention_heads", int, 0, minimum=1, maximum=MAX_SIZE)
    layers = range(config.num_layers)
    heads = [windowed if windowed and config.window(layer) else config.num_heads for layer in layers]
    by_layer = fields.object("per_layer_config")
    if by_layer is not None:  # where it counts alone
        said = [by_layer.object(str(layer)) or JsonFields(fields.path, {}, fields.error) for layer in layers]
        heads = [layer.get("num_attention_heads", int, config.num_heads, minimum=1, maximum=MAX_SIZE) for layer in said]
    limits = (swiglu_limits(fields, key, config.num_layers) for key in ("swiglu_limits", "swiglu_limits_shared"))
    return with_swiglu_limits(with_heads(config, heads, fields.path, CheckpointFormatError), *limits)


def _sparse_layers(fields: JsonFields, count: int) -> set[int]:
    """Return the layers with experts, whose numbers are a list or a text with commas."""
    listed: Any = fields.values.get("moe_layers_enum")
    if listed is None:
        return set(range(_DENSE_LAYERS, count))
    numbers = [part for part in listed.split(",") if part.strip()] if isinstance(listed, str) else listed
    try:
        return {int(number) for number in numbers}
    except (TypeError, ValueError):
        raise CheckpointFormatError(
            f"{fields.path}: moe_layers_enum: expected numbers of layers, got {listed!r:.80}"
        ) from None


def _check_windowed_layers(fields: JsonFields) -> None:
    """Refuse other KV heads in layers with a window."""
    windowed = fields.object(_WINDOWED)
    if windowed is None:
        return
    for key, usual in {"num_attention_groups": "num_key_value_heads", "head_dim": "head_dim"}.items():
        expected = fields.get(usual, int)
        if (got := windowed.get(key, int, expected)) != expected:
            raise UnsupportedModelError(f"{fields.path}: {_WINDOWED}.{key} must be {usual} = {expected}, got {got}")


def _rope_parameters(fields: JsonFields, kinds: list[Any]) -> dict[str, object]:
    """Return the rotary settings of each kind of layer, which some files have as a list of numbers for each layer."""
    parameters = fields.object("rope_parameters")
    said: dict[str, Any] = {} if parameters is None else parameters.values
    if not all(isinstance(said.get(str(kind)), dict) for kind in kinds):
        said = {kind: _rope_of(fields, kinds.index(kind)) for kind in (FULL, SLIDING) if kind in kinds}
        scaling = fields.object("rope_scaling")
        if scaling is not None and FULL in said:
            said[FULL] = said[FULL] | scaling.values
    # A kind of which there is no layer has those of the other one, which nothing reads.
    every: dict[str, dict[str, object]] = {
        kind: said.get(kind) or next(iter(said.values()), {}) for kind in (FULL, SLIDING)
    }
    return {kind: {"partial_rotary_factor": 1.0, **settings} for kind, settings in every.items()}


def _rope_of(fields: JsonFields, layer: int) -> dict[str, object]:
    """Return the rotary settings of a layer."""
    values: dict[str, object] = {"rope_type": "default"}
    for key, name in {"rope_theta": "rope_theta", "partial_rotary_factors": "partial_rotary_factor"}.items():
        setting: Any = fields.values.get(key)
        setting = setting[layer] if isinstance(setting, list) else setting
        if setting is not None:
            values[name] = setting
    return {"rope_theta": 10000.0} | values
