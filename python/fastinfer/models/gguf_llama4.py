"""Settings of Llama 4 that GGUF files leave out, with the values of the published models."""

from dataclasses import replace

from fastinfer.errors import UnsupportedModelError
from fastinfer.formats.gguf import GGUFFile
from fastinfer.models.config import ModelConfig
from fastinfer.models.layer_values import with_llama4_layers

CHUNK = 8192
GROWTH = 0.1
UNNORMED_EXPERTS = 128  # of Maverick, which alone does not normalise queries and keys


def llama4_config(file: GGUFFile, config: ModelConfig) -> ModelConfig:
    """Return the configuration with chunks of the text, growing queries, and the norms of queries and keys.

    Raises:
        UnsupportedModelError: the model has no experts, or a token several, whose inputs would differ.
    """
    if config.experts_per_token != 1:
        raise UnsupportedModelError(f"{file.path}: llama4.expert_used_count must be 1, got {config.experts_per_token}")
    windows = tuple(0 if layer in config.unrotated_layers else CHUNK for layer in range(config.num_layers))
    is_normed = config.num_experts != UNNORMED_EXPERTS
    config = replace(config, shared_intermediate_size=config.intermediate_size)
    return with_llama4_layers(config, windows, GROWTH, CHUNK, is_normed=is_normed)
