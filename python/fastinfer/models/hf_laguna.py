"""Reading of the fields of config.json that only Laguna has."""

from dataclasses import replace

from fastinfer.errors import CheckpointFormatError, UnsupportedModelError
from fastinfer.formats.json_fields import JsonFields
from fastinfer.models.config import MAX_LAYERS, MAX_SIZE, ModelConfig
from fastinfer.models.hf_layers import require_window
from fastinfer.models.hf_states import FULL
from fastinfer.models.layer_values import with_heads
from fastinfer.models.structure import Structure

_GATES = {True: True, "per-head": True, "per-element": False}


def prepare_laguna(fields: JsonFields) -> None:
    """Add the kinds of the layers and of their MLPs if the file does not say them, and the share of rotated elements.

    Raises:
        CheckpointFormatError: the file does not say the length of windows.
    """
    count = fields.get("num_hidden_layers", int, minimum=1, maximum=MAX_LAYERS)
    kinds = {"layer_types": [FULL] * count, "mlp_layer_types": ["dense"] + ["sparse"] * (count - 1)}
    fields.values = {**fields.values, **{key: fields.values.get(key) or default for key, default in kinds.items()}}
    if fields.values["layer_types"] == [FULL] * count:  # transformers takes any length then, such as 0
        fields.values["sliding_window"] = None
    require_window(fields)
    parameters = fields.object("rope_parameters")
    if parameters is not None:  # of which each kind of layer has a share of its own
        shares = {
            kind: {"partial_rotary_factor": 1.0, **settings} if isinstance(settings, dict) else settings
            for kind, settings in parameters.values.items()
        }
        fields.values["rope_parameters"] = shares


def laguna_structure(fields: JsonFields, structure: Structure) -> Structure:
    """Return the structure of the layers, whose gates are of whole heads or of each element.

    Raises:
        UnsupportedModelError: they are neither.
    """
    gating = fields.values.get("gating", True)
    if not isinstance(gating, bool | str) or gating not in _GATES:
        raise UnsupportedModelError(
            f"{fields.path}: gating must be true, 'per-head' or 'per-element', got {gating!r:.80}"
        )
    return replace(structure, head_gate=_GATES[gating])


def laguna_config(fields: JsonFields, config: ModelConfig) -> ModelConfig:
    """Return the configuration with the query heads of each layer and the cap of the router's logits."""
    heads = fields.get("num_attention_heads_per_layer", list, None) or [config.num_heads] * config.num_layers
    if len(heads) != config.num_layers or not all(type(count) is int and 1 <= count <= MAX_SIZE for count in heads):
        raise CheckpointFormatError(
            f"{fields.path}: num_attention_heads_per_layer: expected {config.num_layers} numbers from 1, "
            f"got {heads!r:.80}"
        )
    cap = fields.get("moe_router_logit_softcapping", float, 0.0, minimum=0.0, maximum=1e6)
    config = with_heads(config, heads, fields.path, CheckpointFormatError)
    return replace(config, router=replace(config.router, softcap=cap))
