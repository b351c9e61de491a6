"""Reading of the metadata that only GGUF files of MiMo-V2 have."""

from dataclasses import replace

from fastinfer.errors import GGUFFormatError, UnsupportedModelError
from fastinfer.formats.gguf import GGUFFile
from fastinfer.models.config import MAX_SIZE, KVShape, ModelConfig
from fastinfer.models.gguf_fields import sizes_by_layer

PREFIX = "mimo2"
_KV_HEADS = "attention.head_count_kv"


def mimo_sizes(file: GGUFFile) -> dict[str, int]:
    """Return the sizes that files of other architectures have once for all layers, by their keys."""
    return {_KV_HEADS: min(sizes_by_layer(file, PREFIX, _KV_HEADS))}


def mimo_config(file: GGUFFile, config: ModelConfig) -> ModelConfig:
    """Return the configuration with the heads of each layer, and the sizes and the factor of values.

    Raises:
        GGUFFormatError: the numbers of heads do not divide the query heads.
        UnsupportedModelError: values have more elements than keys.
    """
    heads = sizes_by_layer(file, PREFIX, _KV_HEADS)[: config.num_layers]
    if odd := [count for count in heads if config.num_heads % count]:
        raise GGUFFormatError(f"{file.path}: expected a multiple of {odd[0]} query heads, got {config.num_heads}")
    value_dim = file.get(f"{PREFIX}.attention.value_length", int, config.head_dim, minimum=1, maximum=MAX_SIZE)
    if value_dim > config.head_dim:
        raise UnsupportedModelError(
            f"{file.path}: {PREFIX}.attention.value_length must be at most {config.head_dim}, the length of keys, "
            f"got {value_dim}"
        )
    return replace(
        config,
        kv_shapes=tuple(KVShape(count, config.head_dim) for count in heads),
        local_rope_theta=file.get(f"{PREFIX}.rope.freq_base_swa", float, config.rope_theta, minimum=1.001),
        value_dim=0 if value_dim == config.head_dim else value_dim,
        value_scale=file.get(f"{PREFIX}.attention.value_scale", float, 1.0, minimum=1e-6, maximum=1e6),
        full_sinks=False,
    )
