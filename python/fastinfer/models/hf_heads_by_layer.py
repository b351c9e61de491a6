"""Numbers of query heads that differ by layer, in config.json."""

from collections.abc import Sequence
from dataclasses import replace

from fastinfer.errors import CheckpointFormatError
from fastinfer.formats.json_fields import JsonFields
from fastinfer.models.config import ModelConfig


def heads_by_layer(fields: JsonFields, config: ModelConfig, heads: Sequence[int]) -> ModelConfig:
    """Return the configuration with a number of query heads for each layer.

    Raises:
        CheckpointFormatError: one is no multiple of the KV heads.
    """
    if odd := [count for count in heads if count % config.num_kv_heads]:
        raise CheckpointFormatError(
            f"{fields.path}: expected a multiple of {config.num_kv_heads} query heads in each layer, got {odd[0]}"
        )
    if len(set(heads)) == 1:
        return replace(config, num_heads=heads[0])
    return replace(config, num_heads=max(heads), layer_heads=tuple(heads))
