"""Reading of the fields of config.json that only Llama 4 has."""

from fastinfer.errors import CheckpointFormatError, UnsupportedModelError
from fastinfer.formats.json_fields import JsonFields
from fastinfer.models.config import MAX_LAYERS, MAX_SIZE, ModelConfig
from fastinfer.models.hf_fields import Sizes
from fastinfer.models.layer_values import with_llama4_layers

CHUNKED, FULL = "chunked_attention", "full_attention"


def prepare_llama4(fields: JsonFields) -> None:
    """Add the fields of other families that say the same: which layers have experts, and the widths of both kinds."""
    size = Sizes(fields)
    count = fields.get("num_hidden_layers", int, minimum=1, maximum=MAX_LAYERS)
    step = size("interleave_moe_layer_step")
    sparse = fields.get("moe_layers", list, list(range(step - 1, count, step)))
    width = size("intermediate_size")
    fields.values |= {
        "mlp_layer_types": ["sparse" if layer in sparse else "dense" for layer in range(count)],
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": width,
        "intermediate_size": size("intermediate_size_mlp"),
    }


def llama4_config(fields: JsonFields, config: ModelConfig) -> ModelConfig:
    """Return the configuration with chunks of the text, growing queries, and the norms of queries and keys.

    Layers that rotate attend within chunks, and in the others queries grow with their position.

    Raises:
        UnsupportedModelError: a token has several experts, whose inputs would differ, or rotations change the lengths
            of queries and keys, which are normalised after them.
        CheckpointFormatError: ``layer_types`` has another length or other entries.
    """
    if config.experts_per_token > 1:
        raise UnsupportedModelError(f"{fields.path}: num_experts_per_tok must be 1, got {config.experts_per_token}")
    chunk = fields.get("attention_chunk_size", int, MAX_SIZE, minimum=1)
    rotated = [layer not in config.unrotated_layers for layer in range(config.num_layers)]
    kinds = fields.get("layer_types", list, None) or [CHUNKED if rotates else FULL for rotates in rotated]
    if len(kinds) != config.num_layers or not all(kind in (CHUNKED, FULL) for kind in kinds):
        raise CheckpointFormatError(
            f"{fields.path}: layer_types: expected {config.num_layers} of {CHUNKED} and {FULL}, got {kinds!r:.80}"
        )
    growth = 0.0
    if fields.values.get("attn_temperature_tuning"):
        growth = fields.get("attn_scale", float, minimum=0.0)
    is_normed = fields.get("use_qk_norm", bool)
    if is_normed and config.rope_scaling.kind in ("yarn", "longrope"):
        raise UnsupportedModelError(
            f"{fields.path}: rotary scaling {config.rope_scaling.kind!r} is not implemented with use_qk_norm"
        )
    windows = tuple(chunk if kind == CHUNKED else 0 for kind in kinds) if CHUNKED in kinds else ()
    length = fields.get("floor_scale", int, minimum=1, maximum=MAX_SIZE)
    return with_llama4_layers(config, windows, growth, length, is_normed=is_normed)
