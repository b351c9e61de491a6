"""Reading of the fields of config.json that only Phi-3.5-MoE has."""

from dataclasses import replace

from fastinfer.errors import UnsupportedModelError
from fastinfer.formats.json_fields import JsonFields
from fastinfer.models.config import ModelConfig, RouterConfig
from fastinfer.models.structure import Structure


def prepare_phimoe(fields: JsonFields) -> None:
    """Name the factor of rotated queries and keys as other families do.

    Raises:
        UnsupportedModelError: there is one for short texts and another one for long texts.
    """
    for key in ("rope_parameters", "rope_scaling"):
        scaling = fields.object(key)
        if scaling is None:
            continue
        short, long = (scaling.get(f"{length}_mscale", float, None, minimum=0.0) for length in ("short", "long"))
        if short != long:
            raise UnsupportedModelError(f"{fields.path}: {key}: long_mscale must be short_mscale, {short}, got {long}")
        if short is not None:
            fields.values[key] = {**scaling.values, "attention_factor": short}


def phimoe_structure(fields: JsonFields, structure: Structure) -> Structure:
    """Return the structure with the bias of the output layer, if there is one."""
    return replace(structure, lm_head_bias=fields.get("lm_head_bias", bool, False))


def phimoe_config(fields: JsonFields, config: ModelConfig) -> ModelConfig:
    """Return the configuration with the choice of experts by SparseMixer."""
    jitter = fields.get("router_jitter_noise", float, minimum=0.0, maximum=1.0)
    return replace(config, router=RouterConfig("sparsemixer", renormalize=False, jitter=jitter))
