"""Reading of the metadata that only GGUF files of Step 3.5 have."""

from dataclasses import replace

import numpy as np

from fastinfer.errors import GGUFFormatError
from fastinfer.formats.gguf import GGUFFile
from fastinfer.models.config import ModelConfig
from fastinfer.models.gguf_fields import check_length, sizes_by_layer, windows_by_layer
from fastinfer.models.layer_values import with_heads, with_swiglu_limits

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
    limits, shared = (_limits(file, f"swiglu_clamp_{part}", config.num_layers) for part in ("exp", "shexp"))
    config = with_swiglu_limits(with_heads(config, heads, file.path, GGUFFormatError), limits, shared)
    return replace(
        config,
        windows=windows_by_layer(file, PREFIX)[: config.num_layers],
        rotary_dim=rotary_dim,
        local_rotary_dim=config.rotary_dim,
        local_rope_theta=file.get(f"{PREFIX}.rope.freq_base_swa", float, config.rope_theta, minimum=1.001),
    )


def _limits(file: GGUFFile, key: str, num_layers: int) -> tuple[float, ...]:
    """Return the limit of each layer, 0 for none."""
    values = file.metadata.get(f"{PREFIX}.{key}")
    if values is None:
        return (0.0,) * num_layers
    values = np.asarray(values)
    check_length(file, PREFIX, key, np.atleast_1d(values))
    if values.dtype.kind != "f" or not ((values >= 0) & (values < 1e30)).all():
        raise GGUFFormatError(f"{file.path}: {PREFIX}.{key}: expected numbers from 0, got {values.tolist()!r:.80}")
    return tuple(float(limit) for limit in values[:num_layers])
