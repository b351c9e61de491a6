"""Steps in reading config.json that single families have of their own."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from fastinfer.errors import UnsupportedModelError
from fastinfer.formats.json_fields import JsonFields
from fastinfer.models.config import ModelConfig
from fastinfer.models.hf_bailing import bailing_hybrid_config, prepare_bailing_hybrid
from fastinfer.models.hf_cohere2_moe import cohere2_moe_config, cohere2_moe_structure, prepare_cohere2_moe
from fastinfer.models.hf_experts import prepare_hunyuan_moe
from fastinfer.models.hf_factors import afmoe_config, granite_config, hyperclovax_config, minicpm3_config, muse_config
from fastinfer.models.hf_falcon_h1 import falcon_h1_config, prepare_falcon_h1
from fastinfer.models.hf_gemma4 import gemma4_config, prepare_gemma4
from fastinfer.models.hf_indexer import deepseek_v32_config, glm_dsa_config
from fastinfer.models.hf_kimi import kimi_linear_config, prepare_kimi_linear
from fastinfer.models.hf_laguna import laguna_config, laguna_structure, prepare_laguna
from fastinfer.models.hf_layers import require_window
from fastinfer.models.hf_lfm3 import lfm3_config, lfm3_structure, prepare_lfm3
from fastinfer.models.hf_llama4 import llama4_config, prepare_llama4
from fastinfer.models.hf_mimo import mimo_config, prepare_mimo
from fastinfer.models.hf_nemotron import nemotron_h_config, prepare_nemotron_h
from fastinfer.models.hf_olmo_hybrid import olmo_hybrid_config, prepare_olmo_hybrid
from fastinfer.models.hf_phimoe import phimoe_config, phimoe_structure, prepare_phimoe
from fastinfer.models.hf_states import prepare_granite_hybrid
from fastinfer.models.hf_step import prepare_step, step_config
from fastinfer.models.stored_layers import StoredLayers
from fastinfer.models.structure import Structure


def _nothing(fields: JsonFields) -> None:
    """Leave the fields as they are."""


def _same_structure(fields: JsonFields, structure: Structure) -> Structure:
    return structure


def _same_config(fields: JsonFields, config: ModelConfig) -> ModelConfig:
    return config


@dataclass(frozen=True)
class Steps:
    """Steps of a family, each of which raises the errors of :func:`fastinfer.models.hf_config.read_hf_config`.

    Attributes:
        required: settings with the only value that is implemented.
        prepare: adds the fields by which other families say the same; returns
            :attr:`fastinfer.models.config.ModelConfig.stored_layers` if the file's layers are not the model's.
        structure: returns the structure of the layers, which depends on the fields.
        finish: returns the configuration with what other families do not have.
    """

    required: Mapping[str, object] = field(default_factory=dict)
    prepare: Callable[[JsonFields], StoredLayers | None] = _nothing
    structure: Callable[[JsonFields, Structure], Structure] = _same_structure
    finish: Callable[[JsonFields, ModelConfig], ModelConfig] = _same_config


def _prepare_gemma(fields: JsonFields) -> None:
    if fields.values["hidden_act"] == "gelu":
        fields.values["hidden_act"] = "gelu_pytorch_tanh"  # which the first files mean


def _prepare_dots1(fields: JsonFields) -> None:
    if fields.values.get("scoring_func") == "noaux_tc":
        fields.values["scoring_func"] = "sigmoid"  # with a bias for the choice


def _hyperclovax_structure(fields: JsonFields, structure: Structure) -> Structure:
    return replace(structure, post_norms=fields.get("use_post_norm", bool, True))


def _glm4_moe_structure(fields: JsonFields, structure: Structure) -> Structure:
    return replace(structure, qk_norm="head" if fields.get("use_qk_norm", bool, False) else "none")


def _gpt_neox_structure(fields: JsonFields, structure: Structure) -> Structure:
    return replace(structure, parallel=fields.get("use_parallel_residual", bool, True))


def _ernie_moe_config(fields: JsonFields, config: ModelConfig) -> ModelConfig:
    last = config.num_layers - 1
    if (end := fields.get("moe_layer_end_index", int, -1)) not in (-1, last):
        raise UnsupportedModelError(f"{fields.path}: moe_layer_end_index must be -1 or {last}, got {end}")
    return config


def _nanochat_config(fields: JsonFields, config: ModelConfig) -> ModelConfig:
    # Norms come after the rotation, which changes no length but by this factor.
    return replace(config, rope_scaling=replace(config.rope_scaling, attention_factor=1.0))


def _kolibri_config(fields: JsonFields, config: ModelConfig) -> ModelConfig:
    return replace(config, router=replace(config.router, biased_logits=True))


_GEMMA = {"use_bidirectional_attention": False}
_GEMMA4 = Steps(prepare=prepare_gemma4, finish=gemma4_config)
_GRANITE = Steps(finish=granite_config)
_NO_ATTENTION_BIAS = {"attention_bias": False}
# Which the families' own code does not read.
_DSA = {"rope_interleave": True, "mlp_bias": False}
_RENORMALIZED = Steps({"norm_topk_prob": True})
_STEP = Steps(
    {
        "attention_bias": False,
        "mlp_bias": False,
        "use_head_wise_attn_gate": True,
        "use_moe_router_bias": True,
        "norm_expert_weight": True,
        "moe_router_activation": "sigmoid",
        "zero_centered": True,
        "sink": False,
        "use_rope_layers": [],
    },
    prepare=prepare_step,
    finish=step_config,
)

STEPS: dict[str, Steps] = {
    "AfmoeForCausalLM": Steps(_NO_ATTENTION_BIAS, finish=afmoe_config),
    "ApertusForCausalLM": Steps({"hidden_act": "xielu"}),
    "ArceeForCausalLM": Steps({"hidden_act": "relu2"}),
    # The activation of its experts, whatever the file says.
    "AriaTextForCausalLM": Steps({"hidden_act": "silu", "mlp_bias": False}),
    "BailingHybridForCausalLM": Steps(
        {"no_kda_lora": True, "gated_attention_proj_granularity_type": "head_wise"},
        prepare=prepare_bailing_hybrid,
        finish=bailing_hybrid_config,
    ),
    "CohereForCausalLM": Steps({"use_qk_norm": False}),
    "Cohere2MoeForCausalLM": Steps(
        prepare=prepare_cohere2_moe, structure=cohere2_moe_structure, finish=cohere2_moe_config
    ),
    "DeepseekV2ForCausalLM": Steps({"topk_method": "greedy", "norm_topk_prob": False}),
    "DeepseekV32ForCausalLM": Steps({**_DSA, "indexer_rope_interleave": False}, finish=deepseek_v32_config),
    "Dots1ForCausalLM": Steps(prepare=_prepare_dots1),
    "Ernie4_5_MoeForCausalLM": Steps({"use_bias": False}, finish=_ernie_moe_config),
    "FalconH1ForCausalLM": Steps(prepare=prepare_falcon_h1, finish=falcon_h1_config),
    "GemmaForCausalLM": Steps(_GEMMA, prepare=_prepare_gemma),
    **dict.fromkeys(("Gemma2ForCausalLM", "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"), Steps(_GEMMA)),
    **dict.fromkeys(("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"), _GEMMA4),
    **dict.fromkeys(("Gemma4UnifiedForCausalLM", "Gemma4UnifiedForConditionalGeneration"), _GEMMA4),
    "GlmMoeDsaForCausalLM": Steps({**_DSA, "indexer_rope_interleave": True}, finish=glm_dsa_config),
    "Glm4MoeForCausalLM": Steps(structure=_glm4_moe_structure),
    "GPTNeoXForCausalLM": Steps(structure=_gpt_neox_structure),
    # The activation is one that resembles it.
    "GptOssForCausalLM": Steps({"hidden_act": "silu", "swiglu_alpha": 1.702, "swiglu_limit": 7.0}),
    **dict.fromkeys(("GraniteForCausalLM", "GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"), _GRANITE),
    **dict.fromkeys(("GraniteSWAForCausalLM", "GraniteMoeSWAForCausalLM"), _GRANITE),
    "GraniteMoeHybridForCausalLM": Steps(prepare=prepare_granite_hybrid, finish=granite_config),
    "HunYuanMoEV1ForCausalLM": Steps(prepare=prepare_hunyuan_moe),
    "HyperCLOVAXForCausalLM": Steps(structure=_hyperclovax_structure, finish=hyperclovax_config),
    "HYV3ForCausalLM": Steps({"mlp_bias": False}),
    "KimiLinearForCausalLM": Steps(
        {"mla_use_nope": True, "moe_router_activation_func": "sigmoid"},
        prepare=prepare_kimi_linear,
        finish=kimi_linear_config,
    ),
    "Kolibri1ForCausalLM": Steps(prepare=require_window, finish=_kolibri_config),
    "LagunaForCausalLM": Steps(
        {"attention_bias": False, "moe_apply_router_weight_on_input": False},
        prepare_laguna,
        laguna_structure,
        laguna_config,
    ),
    "Lfm3ForCausalLM": Steps(_NO_ATTENTION_BIAS, prepare_lfm3, lfm3_structure, lfm3_config),
    "Llama4ForCausalLM": Steps(prepare=prepare_llama4, finish=llama4_config),
    "MiMoV2FlashForCausalLM": Steps(prepare=prepare_mimo, finish=mimo_config),
    "MiniCPM3ForCausalLM": Steps(finish=minicpm3_config),
    "MiniMaxM2ForCausalLM": Steps({"use_qk_norm": True, "qk_norm_type": "per_layer", "shared_intermediate_size": 0}),
    "MuseGlimmerForConditionalGeneration": Steps(_NO_ATTENTION_BIAS, finish=muse_config),
    "NanoChatForCausalLM": Steps(finish=_nanochat_config),
    "NemotronHForCausalLM": Steps(prepare=prepare_nemotron_h, finish=nemotron_h_config),
    **dict.fromkeys(("OlmoForCausalLM", "OlmoeForCausalLM"), Steps({"clip_qkv": None})),
    "OlmoHybridForCausalLM": Steps(prepare=prepare_olmo_hybrid, finish=olmo_hybrid_config),
    **dict.fromkeys(
        ("PhimoeForCausalLM", "PhiMoEForCausalLM"),
        Steps({"num_experts_per_tok": 2}, prepare_phimoe, phimoe_structure, phimoe_config),
    ),
    "PhiForCausalLM": Steps({"qk_layernorm": False, "tie_word_embeddings": False}),
    **dict.fromkeys(("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"), _RENORMALIZED),
    "Qwen3VLMoeForConditionalGeneration": _RENORMALIZED,
    **dict.fromkeys(("Step3p5ForCausalLM", "Step3p7ForConditionalGeneration"), _STEP),
    "StableLmForCausalLM": Steps({"qk_layernorm": False, "use_parallel_residual": False}),
}
