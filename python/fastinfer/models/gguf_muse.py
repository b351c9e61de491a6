"""Settings of Muse Glimmer that GGUF files leave out, and the windows of its layers, which alone rotate."""

from dataclasses import replace

from fastinfer.formats.gguf import GGUFFile
from fastinfer.models.config import ModelConfig
from fastinfer.models.gguf_fields import windows_by_layer

POST_NORM_EPS = 1e-8  # of the published model


def muse_glimmer_config(file: GGUFFile, config: ModelConfig) -> ModelConfig:
    """Return the configuration with the windows, and the ``eps`` of the norms of outputs.

    Raises:
        GGUFFormatError: the windows are missing or out of range.
    """
    windows = windows_by_layer(file, config.architecture)[: config.num_layers]
    unrotated = frozenset(layer for layer, window in enumerate(windows) if not window)
    rope_theta = file.get(f"{config.architecture}.rope.freq_base_swa", float, config.rope_theta, minimum=1.001)
    return replace(
        config, windows=windows, unrotated_layers=unrotated, rope_theta=rope_theta, post_norm_eps=POST_NORM_EPS
    )
