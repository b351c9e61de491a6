"""Factors that families have under names of their own in config.json."""

from dataclasses import replace

from fastinfer.formats.json_fields import JsonFields
from fastinfer.models.config import ModelConfig


def afmoe_config(fields: JsonFields, config: ModelConfig) -> ModelConfig:
    """Return the configuration with the scale of the embedding."""
    return replace(config, embedding_scale=config.hidden_size**0.5 if fields.get("mup_enabled", bool) else 1.0)


def granite_config(fields: JsonFields, config: ModelConfig) -> ModelConfig:
    """Return the configuration with Granite's factors, by the last of which logits are divided."""
    return _scaled(fields, config, 1.0, 1.0 / factor(fields, "logits_scaling"))


def hyperclovax_config(fields: JsonFields, config: ModelConfig) -> ModelConfig:
    """Return the configuration with Granite's factors, by the last of which logits are multiplied."""
    return _scaled(fields, config, config.head_dim**-0.5, factor(fields, "logits_scaling"))


def minicpm3_config(fields: JsonFields, config: ModelConfig) -> ModelConfig:
    """Return the configuration with the factors that follow from the sizes of a small model."""
    depth = config.num_layers**0.5
    return replace(
        config,
        embedding_scale=factor(fields, "scale_emb"),
        residual_scale=factor(fields, "scale_depth", depth) / depth,
        logits_scale=factor(fields, "dim_model_base", config.hidden_size) / config.hidden_size,
    )


def muse_config(fields: JsonFields, config: ModelConfig) -> ModelConfig:
    """Return the configuration with Muse Glimmer's factors, and the ``eps`` of the norms of outputs."""
    return replace(
        config,
        query_scale=factor(fields, "qk_scale_factor"),
        logits_scale=factor(fields, "output_multiplier"),
        post_norm_eps=fields.get("post_norm_eps", float, minimum=0.0, maximum=1.0),
    )


def factor(fields: JsonFields, key: str, default: float = 1.0) -> float:
    """Read a factor."""
    return fields.get(key, float, default, minimum=1e-6, maximum=1e6)


def _scaled(fields: JsonFields, config: ModelConfig, attention_scale: float, logits_scale: float) -> ModelConfig:
    return replace(
        config,
        embedding_scale=factor(fields, "embedding_multiplier"),
        residual_scale=factor(fields, "residual_multiplier"),
        attention_scale=factor(fields, "attention_multiplier", attention_scale),
        logits_scale=logits_scale,
    )
