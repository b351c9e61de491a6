"""Reading of the fields of config.json that only OLMo Hybrid has."""

from dataclasses import replace

from fastinfer.formats.json_fields import JsonFields
from fastinfer.models.config import ModelConfig
from fastinfer.models.hf_fields import Sizes
from fastinfer.models.state_config import LinearAttentionConfig

NORM_EPS = 1e-5  # of the norms within linear attention, which no file says


def prepare_olmo_hybrid(fields: JsonFields) -> None:
    """Add the sizes of linear attention that the file leaves out, because they follow from others."""
    size = Sizes(fields)
    heads = size("num_attention_heads")
    key_heads = size("linear_num_key_heads", heads)
    key_dim = size("linear_key_head_dim", int(0.75 * size("hidden_size") / key_heads))
    fields.values |= {
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": size("linear_num_value_heads", heads),
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": size("linear_value_head_dim", 2 * key_dim),
    }


def olmo_hybrid_config(fields: JsonFields, config: ModelConfig) -> ModelConfig:
    """Return the configuration with what is special of linear attention, and without rotations if there is no base."""
    states = config.states
    assert isinstance(states, LinearAttentionConfig)
    beta_scale = 2.0 if fields.get("linear_allow_neg_eigval", bool) else 1.0
    states = replace(states, separate_projections=True, beta_scale=beta_scale, norm_eps=NORM_EPS)
    settings = fields.object("rope_scaling") or fields.object("rope_parameters")
    places = [place.values for place in (settings, fields) if place is not None]
    bases = [values["rope_theta"] for values in places if "rope_theta" in values]
    is_rotated = not bases or bases[0] is not None
    unrotated = frozenset() if is_rotated else frozenset(range(config.num_layers))
    return replace(config, states=states, unrotated_layers=unrotated)
