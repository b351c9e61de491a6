"""Values that differ by layer, from files of any format: query heads, limits of SwiGLU, what Llama 4 has."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fastinfer.models.config import ModelConfig, RouterConfig


def with_heads(config: ModelConfig, heads: Sequence[int], path: Path, error: type[Exception]) -> ModelConfig:
    """Return the configuration with a number of query heads for each layer.

    Args:
        config: the configuration.
        heads: the number of each layer.
        path: the file that has them.
        error: what to raise if one is no multiple of the KV heads.
    """
    if odd := [count for count in heads if count % config.num_kv_heads]:
        raise error(f"{path}: expected a multiple of {config.num_kv_heads} query heads in each layer, got {odd[0]}")
    return replace(config, num_heads=max(heads), layer_heads=tuple(heads) if len(set(heads)) > 1 else ())


def with_swiglu_limits(config: ModelConfig, experts: Sequence[float], shared: Sequence[float]) -> ModelConfig:
    """Return the configuration with the limits of each layer's experts and shared expert, 0 for none.

    MLPs have those of shared experts.
    """
    limits = [shared[n] if n in config.dense_layers else limit for n, limit in enumerate(experts)]
    return replace(
        config,
        swiglu_limits=tuple(limits) if any(limits) else (),
        shared_swiglu_limits=tuple(shared) if any(shared) else (),
    )


def with_llama4_layers(
    config: ModelConfig, windows: tuple[int, ...], growth: float, length: int, *, is_normed: bool
) -> ModelConfig:
    """Return the configuration with attention in chunks of the text, and in layers without positions growing queries.

    Args:
        config: the configuration, which has these layers.
        windows: the length of each layer's chunks, 0 for attention to the whole text; empty for this in all layers.
        growth, length: see :attr:`fastinfer.models.config.ModelConfig.query_growth`.
        is_normed: whether rotated queries and keys are normalised.
    """
    return replace(
        config,
        windows=windows,
        chunked_windows=bool(windows),
        query_growth=growth,
        query_length=length,
        query_offset=1,
        growing_layers=config.unrotated_layers,
        qk_norm="unit" if is_normed else "none",
        unnormed_layers=config.unrotated_layers if is_normed else frozenset(),
        router=RouterConfig("sigmoid", renormalize=False, scales_inputs=True),
    )
