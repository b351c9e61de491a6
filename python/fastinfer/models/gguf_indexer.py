"""Sizes of the indexers of latent attention, from the metadata of a GGUF file."""

from dataclasses import replace

import numpy as np

from fastinfer.errors import GGUFFormatError
from fastinfer.formats.gguf import GGUFFile
from fastinfer.models.config import MAX_SIZE, IndexerConfig, ModelConfig
from fastinfer.models.gguf_fields import check_length


def indexer_config(file: GGUFFile, config: ModelConfig) -> ModelConfig:
    """Return the configuration with an indexer in some layers, which the layers after them share.

    Raises:
        GGUFFormatError: a key is missing or its value is out of range, the queries have no latents, or the first layer
            has no indexer.
    """
    prefix, latent = f"{config.architecture}.attention", config.latent_attention
    assert latent is not None
    if not latent.query_rank:
        raise GGUFFormatError(f"{file.path}: {prefix}.q_lora_rank is missing, which indexers need")

    def size(key: str, minimum: int = 1) -> int:
        return file.get(f"{prefix}.indexer.{key}", int, minimum=minimum, maximum=MAX_SIZE)

    layers: list[int] = []
    for layer, has_own in enumerate(_own_indexers(file, config)):
        if not has_own and not layers:
            raise GGUFFormatError(f"{file.path}: expected an indexer in the first layer, got none")
        layers.append(layer if has_own else layers[-1])
    indexer = IndexerConfig(
        num_heads=size("head_count"),
        head_dim=size("key_length", latent.rotary_dim),
        top_k=size("top_k"),
        interleaved_rope=config.architecture == "glm-dsa",
        layers=tuple(layers),
    )
    return replace(config, indexer=indexer)


def _own_indexers(file: GGUFFile, config: ModelConfig) -> list[bool]:
    """Return whether each layer has an indexer of its own. In files that do not say it, those with its tensors have."""
    key = "attention.indexer.types"
    flags = file.metadata.get(f"{config.architecture}.{key}")
    if flags is None:
        return [f"blk.{layer}.indexer.attn_k.weight" in file.tensors for layer in range(config.num_layers)]
    flags = file.get(f"{config.architecture}.{key}", np.ndarray)
    check_length(file, config.architecture, key, flags)
    return [bool(flag) for flag in flags.tolist()][: config.num_layers]
