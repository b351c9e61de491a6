"""Model configuration from ``config.json``, as Hugging Face's transformers writes it (before and since version 5)."""

from dataclasses import replace
from pathlib import Path

from fastinfer.errors import CheckpointFormatError, UnsupportedModelError
from fastinfer.formats.json_fields import JsonFields
from fastinfer.formats.text_fields import text_fields
from fastinfer.models.config import MAX_LAYERS, ModelConfig
from fastinfer.models.families import FAMILIES, MISSING, RENAMED, Family
from fastinfer.models.hf_experts import num_experts, router, shared_intermediate_size
from fastinfer.models.hf_falcon_h1 import falcon_h1_mamba2
from fastinfer.models.hf_fields import Sizes, activation, require
from fastinfer.models.hf_gpt2 import gpt2_config
from fastinfer.models.hf_latent import latent_attention
from fastinfer.models.hf_layers import attention_windows, dense_layers, state_layers, unrotated_layers
from fastinfer.models.hf_nemotron import nemotron_h_mamba2
from fastinfer.models.hf_rope import Rope
from fastinfer.models.hf_states import adjusted_intermediate_size, granite_mamba2, linear_attention, short_conv
from fastinfer.models.hf_steps import STEPS, Steps
from fastinfer.models.hf_text_parts import TEXT_PARTS, text_part
from fastinfer.models.state_config import StateConfig
from fastinfer.models.structure import FALCON_H1, NEMOTRON_H

# Families that scale rotations where their files do not say how.
_SCALED = (
    *("ApertusForCausalLM", "CwmForCausalLM", "GptOssForCausalLM"),
    *("Ministral3ForCausalLM", "Mistral4ForCausalLM"),
)
# Families whose files may have a rotary base for each layer.
_ROPE_BY_LAYER = ("GraniteSWAForCausalLM", "GraniteMoeSWAForCausalLM")

# Language models within those of text and images, by their model_type, where it may be one of several; first the usual.
_TEXT_MODELS = {
    "Mistral3ForConditionalGeneration": {
        "mistral": "Mistral3ForConditionalGeneration",
        "ministral3": "Ministral3ForCausalLM",
        "mistral4": "Mistral4ForCausalLM",
    },
    "Exaone4_5_ForConditionalGeneration": dict.fromkeys(("exaone4", "exaone4_5_text"), "Exaone4ForCausalLM"),
    "Glm46VForConditionalGeneration": {
        "glm4v_text": "Glm4vForConditionalGeneration",
        "glm4v_moe_text": "Glm4vMoeForConditionalGeneration",
    },
}


def family_of(fields: JsonFields) -> tuple[str, JsonFields]:
    """Find the name of the family, and the fields of its model, which may be a part of the file's.

    Raises:
        UnsupportedModelError: the architecture is not implemented.
        CheckpointFormatError: a value is missing.
    """
    names = fields.get("architectures", list, [])
    name = str(names[0]) if names else f"model_type {fields.get('model_type', str, 'none')!r}"
    name = RENAMED.get(name, name)
    if name in MISSING:
        raise UnsupportedModelError(f"{fields.path}: architecture {name} is not implemented: it needs {MISSING[name]}")
    if (part := text_part(fields, name)) is not None:
        return part
    if name not in FAMILIES:
        raise UnsupportedModelError(
            f"{fields.path}: architecture {name} is not implemented; supported are "
            f"{', '.join((*FAMILIES, *TEXT_PARTS))}"
        )
    text = text_fields(fields)  # of models that have images, too
    if text is None:
        return name, fields
    if models := _TEXT_MODELS.get(name):
        kind = text.get("model_type", str, next(iter(models)))
        if kind not in models:
            *others, last = models
            raise UnsupportedModelError(
                f"{fields.path}: text_config.model_type must be {', '.join(others)} or {last}, got {kind!r:.80}"
            )
        name = models[kind]
    return name, text


def read_hf_config(path: Path) -> ModelConfig:
    """Read the model configuration from ``config.json``.

    Raises:
        UnsupportedModelError: the architecture or one of its settings is not implemented.
        CheckpointFormatError: a value is missing or out of range.
    """
    return parse_hf_config(JsonFields.read(path, CheckpointFormatError))


def parse_hf_config(fields: JsonFields) -> ModelConfig:
    """Parse the fields of ``config.json``; raises the same as :func:`read_hf_config`."""
    path = fields.path
    name, fields = family_of(fields)
    family = FAMILIES[name]
    fields.values = {**family.defaults, **fields.values, **family.fixed}
    fields.values |= {usual: fields.values[own] for usual, own in family.aliases.items() if own in fields.values}
    if name == "GPT2LMHeadModel":
        return gpt2_config(fields)
    steps = STEPS.get(name, Steps())
    stored_layers = steps.prepare(fields) or ()
    size = Sizes(fields)
    hidden_size, num_heads = size("hidden_size"), size("num_attention_heads")
    num_layers = fields.get("num_hidden_layers", int, minimum=1, maximum=MAX_LAYERS)
    num_kv_heads = size("num_key_value_heads", num_heads)
    head_dim = size("head_dim", max(1, hidden_size // num_heads))
    if num_heads % num_kv_heads:
        raise CheckpointFormatError(f"{path}: expected a multiple of {num_kv_heads} query heads, got {num_heads}")
    with_states = state_layers(fields, family, num_layers)
    windows = () if with_states else attention_windows(fields, name, family, num_layers)
    if name in _SCALED and not (fields.object("rope_parameters") or fields.object("rope_scaling")):
        raise CheckpointFormatError(f"{path}: rope_parameters is missing")
    latent = latent_attention(fields, family, size) if family.structure.latent_attention else None
    if latent is not None:
        num_kv_heads, head_dim = 1, latent.row_dim
    rope = Rope(fields, family, head_dim, has_windows=any(windows), latent=latent)
    experts = num_experts(size)
    dense = dense_layers(fields, num_layers) if experts else frozenset()
    for key, value in steps.required.items():
        require(fields, key, value)
    structure = steps.structure(fields, family.structure)
    if latent is not None:
        is_interleaved = structure.interleaved_rope and fields.get("rope_interleave", bool, True)
        structure = replace(structure, interleaved_rope=is_interleaved)
    attention_bias = fields.get("attention_bias", bool, False)
    output_bias = attention_bias and family.output_bias
    if "attention_out_bias" in family.defaults:
        output_bias = fields.get("attention_out_bias", bool)
    epsilon = family.epsilon or ("layer_norm_eps" if structure.norm == "layer_norm" else "rms_norm_eps")
    scalar = fields.get("query_pre_attn_scalar", float, None, minimum=1e-3)
    unrotated = unrotated_layers(fields, name, family, windows, num_layers)
    if name in _ROPE_BY_LAYER:
        unrotated = rope.by_layer(fields, windows, num_layers)
    config = ModelConfig(
        architecture=name,
        hidden_size=hidden_size,
        intermediate_size=(experts and size("moe_intermediate_size", 0)) or adjusted_intermediate_size(fields, size),
        dense_intermediate_size=size("intermediate_size") if dense else 0,
        shared_intermediate_size=shared_intermediate_size(fields, size),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rotary_dim=rope.dim,
        vocab_size=size("vocab_size"),
        draft_vocab_size=_draft_vocab_size(fields, size),
        max_position=rope.max_position,
        norm_eps=fields.get(epsilon, float, 1e-6, minimum=0.0, maximum=1.0),
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        local_rope_theta=rope.local_theta,
        local_rotary_dim=0 if rope.local_dim == rope.dim else rope.local_dim,
        windows=windows,
        state_layers=with_states,
        states=_state_sizes(fields, family, size) if with_states else None,
        latent_attention=latent,
        query_growth=rope.query_growth,
        query_length=rope.query_length,
        unrotated_layers=unrotated,
        stored_layers=stored_layers,
        gated=family.gated,
        activation=family.activation
        or activation(
            fields,
            "hidden_act" if fields.values.get("hidden_activation") is None else "hidden_activation",
            gated=family.gated,
        ),
        qkv_bias=family.qkv_bias or attention_bias,
        output_bias=output_bias,
        mlp_bias=fields.get("mlp_bias", bool, False),
        attention_scale=rope.attention_scale if scalar is None else scalar**-0.5,
        attention_softcap=fields.get("attn_logit_softcapping", float, 0.0, minimum=0.0),
        logits_softcap=fields.get("final_logit_softcapping", float, 0.0, minimum=0.0),
        logits_scale=fields.get("logit_scale", float, 1.0, minimum=1e-6),
        num_experts=experts,
        experts_per_token=fields.get("num_experts_per_tok", int, minimum=1, maximum=experts) if experts else 0,
        router=router(fields, family, experts),
        dense_layers=dense,
        shared_expert_gate=fields.get("shared_expert_gate", bool, False),
        **structure.config_fields(hidden_size),
    )
    return steps.finish(fields, config)


def _state_sizes(fields: JsonFields, family: Family, size: Sizes) -> StateConfig:
    """Return the sizes of the layers with a state."""
    if family.structure.short_convs:
        return short_conv(fields, size)
    if family.structure is NEMOTRON_H:
        return nemotron_h_mamba2(fields, size)
    if family.structure is FALCON_H1:
        return falcon_h1_mamba2(fields, size)
    if family.structure.mamba2:
        return granite_mamba2(fields, size)
    return linear_attention(fields, size)


def _draft_vocab_size(fields: JsonFields, size: Sizes) -> int:
    """Return the number of tokens that a draft model can draft, 0 for all."""
    every, drafted = size("vocab_size"), size("draft_vocab_size", 0)
    if drafted > every:
        raise CheckpointFormatError(f"{fields.path}: draft_vocab_size: expected at most {every}, got {drafted}")
    return drafted
