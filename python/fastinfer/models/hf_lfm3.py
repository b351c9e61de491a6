"""Reading of the fields of config.json that only LFM3 has."""

from dataclasses import replace

from fastinfer.formats.json_fields import JsonFields
from fastinfer.models.config import MAX_SIZE, ModelConfig
from fastinfer.models.hf_rope import local_theta, proportional_rope
from fastinfer.models.hf_states import CONV, FULL, SLIDING
from fastinfer.models.structure import Structure

FULL_ROPE: dict[str, object] = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5}
LOCAL_ROPE: dict[str, object] = {"rope_type": "default", "rope_theta": 1e4}


def prepare_lfm3(fields: JsonFields) -> None:
    """Add the kinds of the layers if the file does not say them."""
    if not fields.get("layer_types", list, []):
        count = fields.get("num_hidden_layers", int, minimum=1)
        kinds = [FULL if i % 4 == 2 else SLIDING if i % 4 == 0 and i > 0 else CONV for i in range(count)]
        fields.values = {**fields.values, "layer_types": kinds}


def lfm3_structure(fields: JsonFields, structure: Structure) -> Structure:
    """Return the structure of the layers, which have norms of outputs and gates by the fields."""
    structure = replace(structure, post_norms=fields.get("use_sandwich_norm", bool))
    if fields.get("use_attention_gate", bool):
        return structure
    return replace(structure, output_gate=False, separate_gate=False, head_gate=False)


def lfm3_config(fields: JsonFields, config: ModelConfig) -> ModelConfig:
    """Return the configuration with the windows and the rotary settings, which differ by kind of layer."""
    theta, scaling = proportional_rope(fields, FULL_ROPE, config.head_dim)
    config = replace(config, rope_theta=theta, rope_scaling=scaling)
    kinds = fields.get("layer_types", list)
    if SLIDING not in kinds:
        return config
    window = fields.get("sliding_window", int, minimum=1, maximum=MAX_SIZE)
    windows = tuple(window if kind == SLIDING else 0 for kind in kinds)
    return replace(config, windows=windows, local_rope_theta=local_theta(fields, LOCAL_ROPE))
