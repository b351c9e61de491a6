"""Numbers of query heads and limits of SwiGLU that differ by layer, from files of any format."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fastinfer.models.config import ModelConfig


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
