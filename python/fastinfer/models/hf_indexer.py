"""Sizes of the indexers of latent attention, from ``config.json``."""

from dataclasses import replace

from fastinfer.errors import CheckpointFormatError, UnsupportedModelError
from fastinfer.formats.json_fields import JsonFields
from fastinfer.models.config import MAX_SIZE, IndexerConfig, ModelConfig
from fastinfer.models.hf_fields import Sizes

OWN, SHARED = "full", "shared"
_LETTERS = {"F": OWN, "S": SHARED}


def deepseek_v32_config(fields: JsonFields, config: ModelConfig) -> ModelConfig:
    """Return the configuration with an indexer in each layer.

    Raises:
        UnsupportedModelError: the queries have no latents, or a layer has another kind of attention.
        CheckpointFormatError: a size is out of range.
    """
    return _with_indexers(fields, config, tuple(range(config.num_layers)), interleaved=False)


def glm_dsa_config(fields: JsonFields, config: ModelConfig) -> ModelConfig:
    """Return the configuration with an indexer in some layers, which the layers after them share.

    Raises:
        UnsupportedModelError: the queries have no latents, or a layer has another kind of attention.
        CheckpointFormatError: a size is out of range, or the kinds of indexers are not those of all layers.
    """
    kinds = _kinds(fields, config.num_layers)
    layers: list[int] = []
    for layer, kind in enumerate(kinds):
        layers.append(layer if kind == OWN else layers[-1])
    return _with_indexers(fields, config, tuple(layers), interleaved=True)


def _with_indexers(
    fields: JsonFields, config: ModelConfig, layers: tuple[int, ...], *, interleaved: bool
) -> ModelConfig:
    latent, size = config.latent_attention, Sizes(fields)
    assert latent is not None
    if not latent.query_rank:
        raise UnsupportedModelError(f"{fields.path}: q_lora_rank must be a size, which indexers need, got null")
    kinds = fields.get("layer_types", list, [])
    if any(kind != "indexed_attention" for kind in kinds):
        raise UnsupportedModelError(f"{fields.path}: layer_types must all be indexed_attention, got {kinds!r:.80}")
    return replace(
        config,
        indexer=IndexerConfig(
            num_heads=size("index_n_heads"),
            head_dim=fields.get("index_head_dim", int, minimum=latent.rotary_dim, maximum=MAX_SIZE),
            top_k=size("index_topk"),
            interleaved_rope=interleaved,
            layers=layers,
        ),
    )


def _kinds(fields: JsonFields, num_layers: int) -> list[object]:
    """Return whether each layer has an indexer of its own, from the list of kinds, a pattern, or a period."""
    key, kinds = "indexer_types", fields.get("indexer_types", list, None)
    if kinds is None and (pattern := fields.values.get("index_topk_pattern")) is not None:
        key = "index_topk_pattern"
        kinds = [_LETTERS.get(letter, letter) for letter in pattern] if isinstance(pattern, str) else pattern
    if kinds is None:
        key, period = "index_topk_freq", max(1, fields.get("index_topk_freq", int, 1, maximum=MAX_SIZE))
        first = fields.get("index_skip_topk_offset", int, 2, minimum=-MAX_SIZE, maximum=MAX_SIZE) - 1
        kinds = [SHARED if max(layer - first, 0) % period else OWN for layer in range(num_layers)]
    is_known = isinstance(kinds, list) and len(kinds) == num_layers and all(kind in (OWN, SHARED) for kind in kinds)
    if not is_known or kinds[0] != OWN:
        raise CheckpointFormatError(
            f"{fields.path}: {key}: expected {num_layers} of {OWN} and {SHARED}, {OWN} first, got {kinds!r:.80}"
        )
    return kinds
