"""The sizes of multi-head latent attention, from ``config.json``."""

from fastinfer.formats.json_fields import JsonFields
from fastinfer.models.config import LatentAttentionConfig
from fastinfer.models.families import Family
from fastinfer.models.hf_fields import Sizes, require
from fastinfer.models.structure import MINICPM3


def latent_attention(fields: JsonFields, family: Family, size: Sizes) -> LatentAttentionConfig:
    """Return the sizes of multi-head latent attention."""
    require(fields, "attention_bias", False)
    num_heads = size("num_attention_heads")
    require(fields, "num_key_value_heads", num_heads)
    value_dim = size("hidden_size") // num_heads if family.structure is MINICPM3 else None
    return LatentAttentionConfig(
        query_rank=size("q_lora_rank", 0),
        rank=size("kv_lora_rank"),
        plain_dim=size("qk_nope_head_dim"),
        rotary_dim=size("qk_rope_head_dim"),
        value_dim=size("v_head_dim", value_dim),
    )
