"""The sizes of multi-head latent attention, from the metadata of a GGUF file."""

import math

from fastinfer.errors import GGUFFormatError
from fastinfer.formats.gguf import GGUFFile
from fastinfer.models.config import MAX_SIZE, LatentAttentionConfig


def latent_attention(file: GGUFFile, architecture: str) -> LatentAttentionConfig:
    """Return the sizes of multi-head latent attention.

    Older files have the lengths of each head's keys and values where newer ones have those of the cached row. Those of
    MiniCPM3 leave out that of the values, which is the usual one then.
    """
    prefix = f"{architecture}.attention"

    def size(key: str, default: int | None = None) -> int:
        return file.get(key, int, *(() if default is None else (default,)), minimum=1, maximum=MAX_SIZE)

    query_dim = size(f"{prefix}.key_length_mla", 0) or size(f"{prefix}.key_length")
    rotary_dim = size(f"{architecture}.rope.dimension_count")
    if rotary_dim >= query_dim:
        raise GGUFFormatError(
            f"{file.path}: rope.dimension_count: expected less than the key length {query_dim}, got {rotary_dim}"
        )
    usual = size(f"{architecture}.embedding_length") // size(f"{prefix}.head_count")
    return LatentAttentionConfig(
        query_rank=size(f"{prefix}.q_lora_rank", 0),
        rank=size(f"{prefix}.kv_lora_rank"),
        plain_dim=query_dim - rotary_dim,
        rotary_dim=rotary_dim,
        value_dim=size(f"{prefix}.value_length_mla", 0) or size(f"{prefix}.value_length", usual),
    )


def latent_scale(file: GGUFFile, architecture: str, latent: LatentAttentionConfig) -> float:
    """Return the scale of the logits of latent attention, with DeepSeek's factor of YaRN."""
    prefix = f"{architecture}.rope.scaling"
    scale: float = latent.query_dim**-0.5
    if file.get(f"{prefix}.type", str, "none") != "yarn":
        return scale
    growth = file.get(f"{prefix}.yarn_log_multiplier", float, 0.0, minimum=0.0)
    factor = file.get(f"{prefix}.factor", float, 1.0, minimum=1e-3)
    magnitude = 1.0 + growth * math.log(max(factor, 1.0))
    return scale * magnitude * magnitude
