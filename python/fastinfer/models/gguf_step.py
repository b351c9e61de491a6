"""Reading of the metadata that only GGUF files of Step 3.5 have."""

from dataclasses import replace

from fastinfer.errors import GGUFFormatError
from fastinfer.formats.gguf import GGUFFile
from fastinfer.models.config import ModelConfig
from fastinfer.models.gguf_fields import sizes_by_layer, windows_by_layer, with_swiglu_clamps
from fastinfer.models.layer_values import with_heads

PREFIX = "step35"


def step_config(file: GGUFFile, config: ModelConfig) -> ModelConfig:
    """Return the configuration with windows, query heads and limits of SwiGLU by layer, and both rotary settings.

    Layers without a window rotate half as many elements as the others, which the file does not say.

    Raises:
        GGUFFormatError: numbers of query heads are no multiples of the KV heads, or limits are negative.
    """
    heads = sizes_by_layer(file, PREFIX, "attention.head_count")[: config.num_layers]
    rotary_dim = config.rotary_dim // 2
    if rotary_dim % 2 or not rotary_dim:
        raise GGUFFormatError(f"{file.path}: expected a rotary size that is a multiple of 4, got {config.rotary_dim}")
    config = with_swiglu_clamps(file, with_heads(config, heads, file.path, GGUFFormatError))
    return replace(
        config,
        windows=windows_by_layer(file, PREFIX)[: config.num_layers],
        rotary_dim=rotary_dim,
        local_rotary_dim=config.rotary_dim,
        local_rope_theta=file.get(f"{PREFIX}.rope.freq_base_swa", float, config.rope_theta, minimum=1.001),
    )
