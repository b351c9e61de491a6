"""The layers and factors of Falcon-H1, from ``config.json``.

A layer of the file has Mamba-2 and attention with the same input, and an MLP. Here these are two layers, Mamba-2 alone,
and attention with the MLP; see :meth:`fastinfer.models.config.ModelConfig.is_parallel`.

The factors become parts of norms, convolutions and scales, which are fp32. No large matrix changes, so that quantised
ones are used as they are, and bf16 ones are not rounded again:

* A factor of an input is one of the norm before it.
* The input of the MLP gets the factor of the gate. Up gets it, too, so the factor of down is divided by it; the
  quotient is the residual scale, by which the factors of the other outputs are divided.
* Attention is linear in its values, so its input gets the factor of its output. Queries and keys get it, too, so the
  scale of the logits is divided by its square, and multiplied by the factor of the keys.
* The input of Mamba-2 gets the factor of z. Those of x, b, c and the time steps are divided by it, and belong to the
  convolution and to the projection of the time steps. That of the output belongs to the norm before its projection.
"""

from dataclasses import replace

from fastinfer.errors import CheckpointFormatError
from fastinfer.formats.json_fields import JsonFields
from fastinfer.models.config import MAX_LAYERS, ModelConfig
from fastinfer.models.hf_factors import factor
from fastinfer.models.hf_fields import Sizes, require
from fastinfer.models.hf_states import FULL, MAMBA, MAMBA_NAMES, dt_limits, mamba2, mamba_head_dim
from fastinfer.models.state_config import Mamba2Config
from fastinfer.models.stored_layers import StoredLayers, split_layers


def prepare_falcon_h1(fields: JsonFields) -> StoredLayers:
    """Give the fields the meanings that those of other families have.

    Returns:
        See :attr:`fastinfer.models.config.ModelConfig.stored_layers`.

    Raises:
        UnsupportedModelError: one of the settings is not implemented.
        CheckpointFormatError: a value is missing or out of range.
    """
    for key in ("attention_bias", "mlp_bias", "projectors_bias", "mamba_proj_bias"):
        require(fields, key, False)
    layers = split_layers(fields.get("num_hidden_layers", int, minimum=1, maximum=MAX_LAYERS))
    fields.values |= {"num_hidden_layers": len(layers), "layer_types": [MAMBA, FULL] * (len(layers) // 2)}
    return layers


def falcon_h1_mamba2(fields: JsonFields, size: Sizes) -> Mamba2Config:
    """Return the sizes and factors of the Mamba-2 layers."""
    require(fields, "hidden_act", "silu")  # the activation of the convolution, too
    has_norm = fields.get("mamba_rms_norm", bool)
    if has_norm:
        require(fields, "mamba_norm_before_gate", False)
    name, inner = "mamba_d_ssm", size("mamba_d_ssm", 0)
    if not inner:
        name, inner = "mamba_expand * hidden_size", size("mamba_expand") * size("hidden_size")
    sizes = mamba2(fields, size, MAMBA_NAMES, mamba_head_dim(fields, size, name, inner), dt_limits(fields))
    z, x, b, c, dt = _factors(fields, "ssm_multipliers", 5)
    return replace(
        sizes,
        has_norm=has_norm,
        input_scale=factor(fields, "ssm_in_multiplier") * z,
        conv_scales=(x / z, b / z, c / z),
        dt_scale=dt / z,
        output_scale=factor(fields, "ssm_out_multiplier") / _residual_scale(fields),
    )


def falcon_h1_config(fields: JsonFields, config: ModelConfig) -> ModelConfig:
    """Return the configuration with the factors outside Mamba-2."""
    residual_scale = _residual_scale(fields)
    output_scale = factor(fields, "attention_out_multiplier") / residual_scale
    return replace(
        config,
        embedding_scale=factor(fields, "embedding_multiplier"),
        attention_input_scale=factor(fields, "attention_in_multiplier") * output_scale,
        attention_scale=config.head_dim**-0.5 * factor(fields, "key_multiplier") / output_scale**2,
        mlp_input_scale=_factors(fields, "mlp_multipliers", 2)[0],
        residual_scale=residual_scale,
        logits_scale=factor(fields, "lm_head_multiplier"),
    )


def _residual_scale(fields: JsonFields) -> float:
    gate, down = _factors(fields, "mlp_multipliers", 2)
    return down / gate


def _factors(fields: JsonFields, key: str, count: int) -> tuple[float, ...]:
    if fields.values.get(key) is None:
        return (1.0,) * count
    factors = fields.numbers(key, count)
    if not all(1e-6 <= each <= 1e6 for each in factors):
        raise CheckpointFormatError(f"{fields.path}: {key}: expected numbers from 1e-06 to 1e+06, got {factors!r:.80}")
    return factors
