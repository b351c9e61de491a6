"""Reading of the metadata that only GGUF files of Granite with windows have."""

from dataclasses import replace

from fastinfer.formats.gguf import GGUFFile
from fastinfer.models.config import ModelConfig
from fastinfer.models.gguf_fields import flags_by_layer, windows_by_layer

PREFIX = "granite_swa"


def granite_swa_config(file: GGUFFile, config: ModelConfig) -> ModelConfig:
    """Return the configuration with the windows of each layer and the layers that are not rotated.

    Raises:
        GGUFFormatError: the windows are missing, or a list does not have a value for each layer.
    """
    key = "attention.rope_pattern"
    rotated = flags_by_layer(file, PREFIX, key) if f"{PREFIX}.{key}" in file.metadata else [True] * config.num_layers
    return replace(
        config,
        windows=windows_by_layer(file, PREFIX)[: config.num_layers],
        unrotated_layers=frozenset(layer for layer in range(config.num_layers) if not rotated[layer]),
    )
