"""The sizes of multi-head latent attention, from ``config.json``."""

from fastinfer.formats.json_fields import JsonFields
from fastinfer.models.config import LatentAttentionConfig
from fastinfer.models.hf_fields import Sizes, require


def latent_attention(fields: JsonFields, size: Sizes) -> LatentAttentionConfig:
    """Return the sizes of multi-head latent attention."""
    require(fields, "attention_bias", False)
    require(fields, "num_key_value_heads", size("num_attention_heads"))
    return LatentAttentionConfig(
        query_rank=size("q_lora_rank", 0),
        rank=size("kv_lora_rank"),
        plain_dim=size("qk_nope_head_dim"),
        rotary_dim=size("qk_rope_head_dim"),
        value_dim=size("v_head_dim"),
    )
