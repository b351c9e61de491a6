"""Reading of the metadata that only GGUF files of Laguna have."""

from dataclasses import replace

import numpy as np

from fastinfer.errors import GGUFFormatError
from fastinfer.formats.gguf import GGUFFile
from fastinfer.models.config import ModelConfig
from fastinfer.models.gguf_fields import sizes_by_layer
from fastinfer.models.layer_values import with_heads

PREFIX = "laguna"
_PERIOD = 4  # of the layers without a window, which come first; the converter does not write which they are


def laguna_config(file: GGUFFile, config: ModelConfig) -> ModelConfig:
    """Return the configuration with windows, query heads and gates by layer, and both rotary settings.

    Raises:
        GGUFFormatError: numbers of query heads are no multiples of the KV heads, or a rotary setting is out of range.
    """
    heads = sizes_by_layer(file, PREFIX, "attention.head_count")[: config.num_layers]
    config = with_heads(config, heads, file.path, GGUFFormatError)
    gate = file.tensors.get("blk.0.attn_gate.weight")  # which no key of the metadata describes
    scaling = config.rope_scaling
    if scaling.kind == "yarn":
        factor = file.get(f"{PREFIX}.rope.scaling.yarn_attn_factor", float, scaling.attention_factor, minimum=0.0)
        scaling = replace(scaling, attention_factor=factor)
    config = replace(config, head_gate=gate is None or gate.shape[0] == config.query_heads(0), rope_scaling=scaling)
    return _with_windows(file, config) if config.windows else config


def _with_windows(file: GGUFFile, config: ModelConfig) -> ModelConfig:
    """Return the configuration with windows in some layers, and their rotary settings, which have no scaling."""
    windows, key = config.windows, f"{PREFIX}.attention.sliding_window_pattern"
    if not isinstance(file.metadata.get(key), np.ndarray):
        period = file.get(key, int, _PERIOD, minimum=1)
        windows = tuple(window if layer % period else 0 for layer, window in enumerate(windows))
    key = f"{PREFIX}.rope.dimension_count_swa"
    rotary_dim = file.get(key, int, config.rotary_dim, minimum=1, maximum=config.head_dim)
    if rotary_dim % 2:
        raise GGUFFormatError(f"{file.path}: {key}: expected an even size, got {rotary_dim}")
    return replace(
        config,
        windows=windows,
        local_rotary_dim=0 if rotary_dim == config.rotary_dim else rotary_dim,
        local_rope_theta=file.get(f"{PREFIX}.rope.freq_base_swa", float, config.rope_theta, minimum=1.001),
    )
