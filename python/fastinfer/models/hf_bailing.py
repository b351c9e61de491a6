"""Reading of the fields of config.json that only Bailing hybrid has, as transformers' ``BailingHybridConfig`` does.

Limits of SwiGLU are read as llama.cpp's converter does; transformers does not know them.
"""

from dataclasses import replace

from fastinfer.formats.json_fields import JsonFields
from fastinfer.models.config import MAX_LAYERS, ModelConfig
from fastinfer.models.hf_fields import Sizes, swiglu_limits
from fastinfer.models.hf_states import FULL
from fastinfer.models.layer_values import with_swiglu_limits
from fastinfer.models.state_config import LinearAttentionConfig

LINEAR = "linear_attention"
_EXPERTS = "expert", "share_expert"
_SHARE = "partial_rotary_factor"


def prepare_bailing_hybrid(fields: JsonFields) -> None:
    """Add the kinds of the layers, and the sizes of linear attention by their usual names."""
    size = Sizes(fields)
    count = fields.get("num_hidden_layers", int, minimum=1, maximum=MAX_LAYERS)
    period = size("layer_group_size")
    if not fields.get("layer_types", list, []):
        fields.values["layer_types"] = [LINEAR if (layer + 1) % period else FULL for layer in range(count)]
    # transformers writes the width of heads with linear attention under this name, and another one as head_dim.
    heads, dim = size("num_attention_heads"), size("linear_head_dim", size("head_dim"))
    fields.values |= {
        "linear_num_key_heads": heads,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": dim,
        "linear_value_head_dim": dim,
        "linear_conv_kernel_dim": size("short_conv_kernel_size"),
    }
    # Published files have a share of the elements that nothing reads: all of qk_rope_head_dim are rotated.
    fields.values[_SHARE] = None
    for key in ("rope_parameters", "rope_scaling"):
        if (rotary := fields.object(key)) is not None:
            fields.values[key] = {name: value for name, value in rotary.values.items() if name != _SHARE}


def bailing_hybrid_config(fields: JsonFields, config: ModelConfig) -> ModelConfig:
    """Return the configuration with decays of channels, which may have a lower bound, and limits of SwiGLU."""
    states = config.states
    assert isinstance(states, LinearAttentionConfig)
    states = states.with_channel_decays(rank=0)
    if fields.get("kda_safe_gate", bool):
        states = replace(states, decay_bound=fields.get("kda_lower_bound", float, minimum=-1e3, maximum=-1e-3))
    limits = (swiglu_limits(fields, f"{part}_swiglu_limit_list", config.num_layers) for part in _EXPERTS)
    return with_swiglu_limits(replace(config, states=states), *limits)
