"""Families of Hugging Face checkpoints: names of their tensors, and properties that config.json does not have."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fastinfer.models.checkpoint import XIELU_PARAMETERS
from fastinfer.models.structure import (
    AFMOE,
    AXK1,
    BAILING_HYBRID,
    COHERE,
    EXAONE4,
    EXAONE_MOE,
    FALCON_H1,
    GEMMA,
    GEMMA2,
    GEMMA3,
    GEMMA4,
    GLM4,
    GPT_NEOX,
    GPT_OSS,
    GRANITE_HYBRID,
    GRANITE_SWA,
    HEAD_NORMS,
    INTERLEAVED,
    JOINT_NORMS,
    KIMI_LINEAR,
    KOLIBRI,
    LAGUNA,
    LATE_HEAD_NORMS,
    LATENT,
    LAYER_NORMS,
    LFM2,
    LFM3,
    LLAMA4,
    MELLUM,
    MIMO,
    MINICPM3,
    MUSE_GLIMMER,
    NANOCHAT,
    NEMOTRON_H,
    OLMO,
    OLMO2,
    OLMO_HYBRID,
    PHI,
    POST_NORMS,
    QWEN3_NEXT,
    STEP,
    VAULT_GEMMA,
    Structure,
)

# The project's names of a layer's parts, with the usual names in checkpoints.
_LAYER = {
    "attention_norm": "input_layernorm",
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "o_proj": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "gate_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "down_proj": "mlp.down_proj",
    "sinks": "self_attn.sinks",
    "router": "mlp.gate",
    "router_bias": "mlp.gate.e_score_correction_bias",
    "experts": "mlp.experts",
    "shared_expert": "mlp.shared_experts",
    "shared_expert_gate": "mlp.shared_expert_gate",
    "output_gate": "self_attn.gate_proj",
}
_EXPERT = {"gate_proj": "gate_proj", "up_proj": "up_proj", "down_proj": "down_proj"}
_STACKED = {"down_proj": "down_proj", **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj")}
# Mixtral's and MiniMax's names.
_W123 = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_LINEAR_LAYER = {
    "in_proj_qkv": "linear_attn.in_proj_qkv",
    "in_proj_z": "linear_attn.in_proj_z",
    "in_proj_a": "linear_attn.in_proj_a",
    "in_proj_b": "linear_attn.in_proj_b",
    "conv1d": "linear_attn.conv1d",
    "A_log": "linear_attn.A_log",
    "dt_bias": "linear_attn.dt_bias",
    "gated_norm": "linear_attn.norm",
    "out_proj": "linear_attn.out_proj",
}
_LATENT_LAYER = {
    "q_a_proj": "self_attn.q_a_proj",
    "q_a_norm": "self_attn.q_a_layernorm",
    "q_b_proj": "self_attn.q_b_proj",
    "kv_a_proj": "self_attn.kv_a_proj_with_mqa",
    "kv_a_norm": "self_attn.kv_a_layernorm",
    "kv_b_proj": "self_attn.kv_b_proj",
    # Only GGUF files have these instead.
    "k_b_proj": "self_attn.k_b_proj",
    "v_b_proj": "self_attn.v_b_proj",
}
_KIMI_DELTA_LAYER = {
    **{f"in_proj_{name}": f"self_attn.{name}_proj" for name in ("q", "k", "v", "b")},
    "in_proj_a": "self_attn.f_a_proj",
    "in_proj_a_up": "self_attn.f_b_proj",
    "in_proj_z": "self_attn.g_a_proj",
    "in_proj_z_up": "self_attn.g_b_proj",
    "conv1d": "self_attn.conv1d",
    "A_log": "self_attn.A_log",
    "dt_bias": "self_attn.dt_bias",
    "gated_norm": "self_attn.o_norm",
    "out_proj": "self_attn.o_proj",
}
# DeepSeek-V3's experts.
_DEEPSEEK_EXPERTS = {
    "norm_topk_prob": True,
    "n_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
}
_INDEXER = {
    "index_q_proj": "self_attn.indexer.wq_b",
    "index_k_proj": "self_attn.indexer.wk",
    "index_k_norm": "self_attn.indexer.k_norm",
    "index_weights": "self_attn.indexer.weights_proj",
}
_POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm",
}
_TOP = {"embedding": "model.embed_tokens", "norm": "model.norm", "lm_head": "lm_head", "layers": "model.layers"}
_GPT2_TOP = {
    "embedding": "transformer.wte",
    "position_embedding": "transformer.wpe",
    "norm": "transformer.ln_f",
    "lm_head": "lm_head",
    "layers": "transformer.h",
}


@dataclass(frozen=True)
class Family:
    """Properties of one architecture.

    Attributes:
        layer: the project's names of a layer's parts, with the checkpoint's names.
        other_names: names that some files have for parts instead of those in ``layer``.
        conv_parts: names of the filters of queries, keys and values, in files that do not have them as one tensor.
        expert: the same for the parts of an expert.
        shared: the same for those of the expert that all tokens have; empty if they have the same names.
        top: the same for tensors outside the layers, and ``layers`` for the layers themselves.
        prefix: prefix of all names, which some checkpoints leave out.
        defaults: values of config.json that its writers may leave out. Families whose layers may have a window have
            ``sliding_window`` among them; that of other families' files has no meaning.
        fixed: values of config.json that its files may have, too, but that their own program does not read.
        structure: structure of the layers.
        aliases: usual names of settings, with other names that this family's files may have, and that come first.
        activation: activation of the MLP, by its name in :mod:`fastinfer.ops.gemm`; ``None`` if config.json says it.
        gated: whether the MLP has a gate.
        qkv_bias: whether Q, K and V have a bias where config.json does not say so.
        output_bias: whether the output of attention has a bias if Q, K and V have one by ``attention_bias``.
        sigmoid_router: whether experts are chosen by sigmoids and a bias.
        router_bias: whether a bias takes part in the choice of other routers, too.
        optional_router_bias: whether files may leave out the bias of the choice, which is then 0.
        epsilon: config.json's name of the norms' ``eps``; ``None`` for the usual one, which follows from the norm.
        norm_offset: number added to the stored weights of norms, except those within linear attention.
        plain_last_norm: whether it is not added to those of the norm after the last layer, either.
        rope_alpha: whether ``alpha``, if the file has it, scales the base of rotations, and nothing else does.
        query_growth: whether queries grow with their position (``llama_4_scaling_beta``).
        transposed: whether matrices are stored as [in_features, out_features].
        qkv_by_head: whether the fused matrix of Q, K and V has the rows of each head's query, key and value together.
        stacked: the same for tensors that have a projection of all experts, or pairs of tensors in MXFP4; empty if
            each expert always has tensors of its own. A checkpoint may have either.
        stacked_order: ``"out_in"`` if these tensors are [experts, out_features, in_features], ``"in_out"`` if they are
            [experts, in_features, out_features], or ``"any"`` for both.
    """

    layer: Mapping[str, str] = field(default_factory=lambda: _LAYER)
    expert: Mapping[str, str] = field(default_factory=lambda: _EXPERT)
    shared: Mapping[str, str] = field(default_factory=dict)
    top: Mapping[str, str] = field(default_factory=lambda: _TOP)
    prefix: str = "model."
    defaults: Mapping[str, object] = field(default_factory=dict)
    fixed: Mapping[str, object] = field(default_factory=dict)
    structure: Structure = field(default_factory=Structure)
    aliases: Mapping[str, str] = field(default_factory=dict)
    activation: str | None = None
    gated: bool = True
    qkv_bias: bool = False
    output_bias: bool = True
    sigmoid_router: bool = False
    router_bias: bool = False
    optional_router_bias: bool = False
    epsilon: str | None = None
    norm_offset: float = 0.0
    plain_last_norm: bool = False
    rope_alpha: bool = False
    query_growth: bool = False
    transposed: bool = False
    qkv_by_head: bool = False
    stacked: Mapping[str, str] = field(default_factory=dict)
    stacked_order: str = "out_in"
    other_names: Mapping[str, str] = field(default_factory=dict)
    conv_parts: tuple[str, ...] = ()


_GEMMA2 = Family(
    _LAYER | _POST_NORMS,
    structure=GEMMA2,
    norm_offset=1.0,
    defaults={
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
)
_GEMMA3 = replace(
    _GEMMA2,
    structure=GEMMA3,
    # Files of the larger models name only what differs from these.
    defaults={
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "query_pre_attn_scalar": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 4096,
    },
)
_GEMMA4 = Family(
    _LAYER
    | _POST_NORMS
    | {
        "layer_scale": "layer_scalar",
        "per_layer_gate": "per_layer_input_gate",
        "per_layer_projection": "per_layer_projection",
        "post_per_layer_norm": "post_per_layer_input_norm",
        "router": "router.proj",
        "router_scale": "router.scale",
        "expert_scale": "router.per_expert_scale",
        "experts": "experts",
        "experts_norm": "pre_feedforward_layernorm_2",
        "post_dense_norm": "post_feedforward_layernorm_1",
        "post_experts_norm": "post_feedforward_layernorm_2",
    },
    top=_TOP
    | {
        "per_layer_embedding": "model.embed_tokens_per_layer",
        "per_layer_model_projection": "model.per_layer_model_projection",
        "per_layer_norm": "model.per_layer_projection_norm",
    },
    structure=GEMMA4,
    stacked=_STACKED,
    defaults={
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262144,
        "max_position_embeddings": 131072,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 512,
        "hidden_size_per_layer_input": 256,
        "norm_topk_prob": True,
    },
)
# The model without encoders of images and sound.
_GEMMA4_UNIFIED = replace(
    _GEMMA4,
    defaults={
        **_GEMMA4.defaults,
        "sliding_window": 1024,
        "max_position_embeddings": 262144,
        "hidden_size_per_layer_input": 0,
    },
)
_VAULT_GEMMA = replace(_GEMMA2, layer=_LAYER | {"mlp_norm": "pre_feedforward_layernorm"}, structure=VAULT_GEMMA)
_SLIDING = {"sliding_window": 4096}
# Families whose own code reads the length of a window alone, which all layers have then, and no settings of biases.
_ONE_WINDOW = {"use_sliding_window": True, "layer_types": None}
_NO_BIAS = {"attention_bias": False, "mlp_bias": False}
_MINISTRAL = Family(defaults={"num_key_value_heads": 8, **_SLIDING})
_MISTRAL = replace(_MINISTRAL, fixed={**_ONE_WINDOW, **_NO_BIAS})
# One setting for all biases.
_ONE_BIAS = {"attention_bias": "use_bias", "mlp_bias": "use_bias"}
_ERNIE = {"rms_norm_eps": 1e-5, "rope_theta": 5e5, "use_bias": False}
_GLM = Family(
    _LAYER | dict.fromkeys(("gate_proj", "up_proj"), "mlp.gate_up_proj"),
    structure=INTERLEAVED,
    output_bias=False,
    defaults={
        "head_dim": 128,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1.5625e-7,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
    },
)
_GLM4_NORMS = {"post_attention_norm": "post_self_attn_layernorm", "post_mlp_norm": "post_mlp_layernorm"}
_GLM4_MOE = Family(
    output_bias=False,
    sigmoid_router=True,
    defaults={"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "norm_topk_prob": True, "n_shared_experts": 1},
)
_GLM4V = Family(
    {**_GLM.layer, **_GLM4_NORMS},
    structure=GLM4,
    qkv_bias=True,
    output_bias=False,
    defaults={"num_key_value_heads": 2, "rms_norm_eps": 1e-5},
)
_OLMO2 = Family(
    _LAYER | {"post_attention_norm": "post_attention_layernorm", "post_mlp_norm": "post_feedforward_layernorm"},
    structure=OLMO2,
    defaults={"rms_norm_eps": 1e-5},
)
_EXAONE4 = replace(_OLMO2, structure=EXAONE4, defaults={**_OLMO2.defaults, **_SLIDING})
_EXAONE_MOE = Family(
    _LAYER | {"router_bias": "mlp.e_score_correction_bias"},
    structure=EXAONE_MOE,
    aliases={"n_shared_experts": "num_shared_experts"},
    sigmoid_router=True,
    defaults={
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5,
        "norm_topk_prob": True,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        **_SLIDING,
    },
)
_COHERE = Family(
    _LAYER | {"mlp_norm": "input_layernorm"},
    structure=COHERE,
    defaults={"logit_scale": 0.0625, "layer_norm_eps": 1e-5},
)
_FC12 = {"up_proj": "mlp.fc1", "down_proj": "mlp.fc2"}
_HUNYUAN = Family(
    _LAYER | {"q_norm": "self_attn.query_layernorm", "k_norm": "self_attn.key_layernorm"},
    structure=LATE_HEAD_NORMS,
    rope_alpha=True,
    defaults={"rms_norm_eps": 1e-5},
)
_QWEN3_5 = Family(
    _LAYER | _LINEAR_LAYER,
    structure=QWEN3_NEXT,
    norm_offset=1.0,
    defaults={
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    },
)
_QWEN3_5_MOE = replace(
    _QWEN3_5,
    layer={**_QWEN3_5.layer, "shared_expert": "mlp.shared_expert"},
    stacked=_STACKED,
    defaults={
        **_QWEN3_5.defaults,
        "norm_topk_prob": True,
        "shared_expert_intermediate_size": 512,
        "shared_expert_gate": True,
    },
)
# What their code takes where config.json does not say it.
_GRANITE_SWA = {"sliding_window": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192}
_GRANITE_SHARED = {"gate_proj": "input_linear", "up_proj": "input_linear", "down_proj": "output_linear"}
_GRANITE_MOE = Family(
    _LAYER | {"router": "block_sparse_moe.router.layer", "experts": "block_sparse_moe", "shared_expert": "shared_mlp"},
    _GRANITE_SHARED,
    stacked={name: f"{stored}.weight" for name, stored in _GRANITE_SHARED.items()},
    defaults={"norm_topk_prob": True},
)
_MAMBA_LAYER = {
    "in_proj": "mamba.in_proj",
    "conv1d": "mamba.conv1d",
    "A_log": "mamba.A_log",
    "D": "mamba.D",
    "dt_bias": "mamba.dt_bias",
    "gated_norm": "mamba.norm",
    "out_proj": "mamba.out_proj",
}
_LFM2 = Family(
    _LAYER
    | {
        "attention_norm": "operator_norm",
        "o_proj": "self_attn.out_proj",
        "q_norm": "self_attn.q_layernorm",
        "k_norm": "self_attn.k_layernorm",
        "in_proj": "conv.in_proj",
        "conv1d": "conv.conv",
        "out_proj": "conv.out_proj",
        "mlp_norm": "ffn_norm",
        "gate_proj": "feed_forward.w1",
        "up_proj": "feed_forward.w3",
        "down_proj": "feed_forward.w2",
        "router": "feed_forward.gate",
        "router_bias": "feed_forward.expert_bias",
        "experts": "feed_forward.experts",
    },
    _W123,
    top=_TOP | {"norm": "model.embedding_norm"},
    structure=LFM2,
    defaults={"rope_theta": 1e6, "conv_L_cache": 3, "norm_eps": 1e-5},
    epsilon="norm_eps",
)
_LFM3 = replace(
    _LFM2,
    layer={
        **_LFM2.layer,
        "o_proj": "self_attn.o_proj",
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm",
        "post_attention_norm": "post_operator_norm",
        "post_mlp_norm": "post_ffn_norm",
    },
    structure=LFM3,
    aliases={"norm_eps": "rms_norm_eps"},
    defaults={
        "head_dim": 128,
        "num_key_value_heads": 4,
        "conv_L_cache": 7,
        "norm_eps": 1e-5,
        "sliding_window": 256,
        "use_sandwich_norm": True,
        "use_attention_gate": True,
    },
)
_PHIMOE = Family(
    _LAYER | {"router": "block_sparse_moe.gate", "experts": "block_sparse_moe.experts"},
    _W123,
    structure=LAYER_NORMS,
    epsilon="rms_norm_eps",
    defaults={
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "sliding_window": None,
        "num_local_experts": 16,
        "num_experts_per_tok": 2,
        "router_jitter_noise": 0.01,
    },
    fixed={**_ONE_WINDOW, "mlp_bias": False},
)
_QWEN_WINDOWS = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_QWEN2_VL = Family(
    qkv_bias=True,
    output_bias=False,
    defaults={**_QWEN_WINDOWS, "max_window_layers": 80, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
)

_STEP = Family(
    _LAYER
    | {
        "output_gate": "self_attn.g_proj",
        "router": "moe.gate",
        "router_bias": "moe.router_bias",
        "experts": "moe",
        "shared_expert": "share_expert",
    },
    structure=STEP,
    stacked={name: f"{stored}.weight" for name, stored in _EXPERT.items()},
    norm_offset=1.0,
    sigmoid_router=True,
    aliases={
        "num_key_value_heads": "num_attention_groups",
        "n_routed_experts": "moe_num_experts",
        "num_experts_per_tok": "moe_top_k",
        "shared_expert_intermediate_size": "share_expert_dim",
        "routed_scaling_factor": "moe_router_scaling_factor",
    },
    defaults={
        "hidden_size": 4096,
        "intermediate_size": 11264,
        "num_hidden_layers": 45,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128815,
        "max_position_embeddings": 128000,
        "rms_norm_eps": 1e-5,
        "n_routed_experts": 288,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1280,
        "share_expert_dim": 1280,
        "sliding_window": None,
    },
    fixed={
        "hidden_act": "silu",
        "norm_topk_prob": True,
        "moe_layer_freq": None,
        "n_group": 1,
        "topk_group": 1,
    },
)
# What other architectures need that is not implemented.
MISSING = {
    "MistralLarge4ForConditionalGeneration": "attention to chosen tokens, and latents that layers share",
    "PaliGemmaForConditionalGeneration": "attention in both directions within a prompt",
    **dict.fromkeys(
        ("MiniMaxM3SparseForConditionalGeneration", "MiniMaxM3VLForCausalLM"),
        "sparse attention to blocks that an index of the keys chooses",
    ),
}

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": _MISTRAL,
    "Ministral3ForCausalLM": Family(
        defaults={"rms_norm_eps": 1e-5, "sliding_window": None}, fixed={**_ONE_WINDOW, **_NO_BIAS}, query_growth=True
    ),
    "Qwen2ForCausalLM": Family(qkv_bias=True, output_bias=False, defaults=_QWEN_WINDOWS),
    "Qwen3ForCausalLM": Family(structure=HEAD_NORMS, defaults=_QWEN_WINDOWS),
    "Llama4ForCausalLM": Family(
        {name: stored.replace("mlp.", "feed_forward.") for name, stored in _LAYER.items()}
        | {"router": "feed_forward.router", "shared_expert": "feed_forward.shared_expert"},
        structure=LLAMA4,
        sigmoid_router=True,
        stacked=_STACKED,
        stacked_order="in_out",
        defaults={
            "head_dim": 128,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "intermediate_size_mlp": 16384,
            "num_local_experts": 16,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 1,
            "use_expert_bias": False,
            "use_qk_norm": True,
            "attention_chunk_size": 8192,
            "attn_temperature_tuning": True,
            "floor_scale": 8192,
            "attn_scale": 0.1,
        },
    ),
    "SmolLM3ForCausalLM": Family(defaults={"rope_theta": 2e6, "use_sliding_window": False, "sliding_window": None}),
    "MinistralForCausalLM": _MINISTRAL,
    "CwmForCausalLM": Family(
        defaults={"head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": 8192}
    ),
    "SeedOssForCausalLM": Family(
        defaults={"head_dim": 128, "num_key_value_heads": 8, "attention_bias": True, "attention_out_bias": False}
    ),
    "ApertusForCausalLM": Family(
        _LAYER
        | {"attention_norm": "attention_layernorm", "mlp_norm": "feedforward_layernorm"}
        | {name: f"mlp.act_fn.{name.removeprefix('xielu_')}" for name in XIELU_PARAMETERS},
        structure=HEAD_NORMS,
        activation="xielu",
        gated=False,
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 12e6},
        fixed={"mlp_bias": False},
    ),
    "ArceeForCausalLM": Family(activation="relu2", gated=False, defaults={"rms_norm_eps": 1e-5}),
    "Ernie4_5ForCausalLM": Family(
        structure=INTERLEAVED, aliases=_ONE_BIAS, defaults={"head_dim": 128, "num_key_value_heads": 2, **_ERNIE}
    ),
    "Ernie4_5_MoeForCausalLM": Family(
        _LAYER | {"router_bias": "mlp.moe_statics.e_score_correction_bias"},
        structure=INTERLEAVED,
        aliases={
            "num_experts": "moe_num_experts",
            "num_experts_per_tok": "moe_k",
            "n_shared_experts": "moe_num_shared_experts",
            "first_k_dense_replace": "moe_layer_start_index",
            "decoder_sparse_step": "moe_layer_interval",
        },
        router_bias=True,
        defaults={
            "num_key_value_heads": 4,
            "num_experts": 64,
            "num_experts_per_tok": 6,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            **_ERNIE,
        },
    ),
    "GlmForCausalLM": _GLM,
    "Glm4ForCausalLM": replace(_GLM, layer={**_GLM.layer, **_GLM4_NORMS}, structure=GLM4),
    "HunYuanDenseV1ForCausalLM": _HUNYUAN,
    "HunYuanMoEV1ForCausalLM": replace(
        _HUNYUAN,
        layer={**_HUNYUAN.layer, "router": "mlp.gate.wg", "shared_expert": "mlp.shared_mlp"},
        aliases={"num_experts_per_tok": "moe_topk"},
        # Files say more than transformers computes, each of them for every layer.
        fixed={
            "moe_intermediate_size": None,
            "shared_expert_intermediate_size": None,
            "norm_topk_prob": True,
            "routed_scaling_factor": None,
            "scoring_func": None,
            "n_group": None,
            "topk_group": None,
            "first_k_dense_replace": None,
        },
        defaults={**_HUNYUAN.defaults, "num_experts": 1, "num_experts_per_tok": 1},
    ),
    "NemotronForCausalLM": Family(
        structure=LAYER_NORMS,
        gated=False,
        epsilon="norm_eps",
        norm_offset=1.0,
        defaults={"hidden_act": "relu2", "norm_eps": 1e-5, "partial_rotary_factor": 0.5},
    ),
    "Jais2ForCausalLM": Family(
        structure=LAYER_NORMS,
        gated=False,
        defaults={"hidden_act": "relu2", "layer_norm_eps": 1e-5, "attention_bias": True, "mlp_bias": True},
    ),
    "HeliumForCausalLM": Family(
        structure=INTERLEAVED,
        output_bias=False,
        defaults={"head_dim": 128, "num_key_value_heads": 20, "rms_norm_eps": 1e-8, "rope_theta": 1e5},
    ),
    "NanoChatForCausalLM": Family(
        _LAYER | _FC12,
        structure=NANOCHAT,
        gated=False,
        defaults={"hidden_act": "relu2", "final_logit_softcapping": 15.0},
    ),
    "PhiForCausalLM": Family(
        _LAYER | {"o_proj": "self_attn.dense", "mlp_norm": "input_layernorm", **_FC12},
        top=_TOP | {"norm": "model.final_layernorm"},
        structure=PHI,
        gated=False,
        fixed={"attention_bias": True, "mlp_bias": True},
        defaults={
            "hidden_act": "gelu_new",
            "layer_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
        },
    ),
    "GPTNeoXForCausalLM": Family(
        _LAYER
        | dict.fromkeys(("q_proj", "k_proj", "v_proj"), "attention.query_key_value")
        | {"o_proj": "attention.dense", "up_proj": "mlp.dense_h_to_4h", "down_proj": "mlp.dense_4h_to_h"},
        top={
            "embedding": "gpt_neox.embed_in",
            "norm": "gpt_neox.final_layer_norm",
            "lm_head": "embed_out",
            "layers": "gpt_neox.layers",
        },
        prefix="gpt_neox.",
        structure=GPT_NEOX,
        aliases={"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"},
        fixed={"mlp_bias": True, "num_key_value_heads": None, "head_dim": None},
        gated=False,
        qkv_by_head=True,
        defaults={
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-5,
            "attention_bias": True,
            "rotary_emb_base": 10000.0,
            "rotary_pct": 0.25,
        },
    ),
    "Starcoder2ForCausalLM": Family(
        _LAYER | {"up_proj": "mlp.c_fc", "down_proj": "mlp.c_proj"},
        structure=LAYER_NORMS,
        aliases=_ONE_BIAS,
        gated=False,
        epsilon="norm_epsilon",
        fixed=_ONE_WINDOW,
        defaults={"norm_epsilon": 1e-5, "use_bias": True, "sliding_window": None, "hidden_act": "gelu_pytorch_tanh"},
    ),
    "StableLmForCausalLM": Family(
        structure=LAYER_NORMS,
        aliases={"attention_bias": "use_qkv_bias"},
        output_bias=False,
        defaults={"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25},
    ),
    "GemmaForCausalLM": Family(
        structure=GEMMA,
        norm_offset=1.0,
        defaults={"head_dim": 256, "num_key_value_heads": 16, "hidden_act": "gelu_pytorch_tanh"},
    ),
    "Gemma2ForCausalLM": _GEMMA2,
    "VaultGemmaForCausalLM": _VAULT_GEMMA,
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma4ForCausalLM": _GEMMA4,
    "Gemma4UnifiedForCausalLM": _GEMMA4_UNIFIED,
    "OlmoForCausalLM": Family(structure=OLMO, fixed={"layer_norm_eps": 1e-5}),
    "Olmo2ForCausalLM": _OLMO2,
    "Olmo3ForCausalLM": replace(_OLMO2, defaults={**_OLMO2.defaults, **_SLIDING, "rope_theta": 5e5}),
    "OlmoHybridForCausalLM": Family(
        {
            **_OLMO2.layer,
            "mlp_norm": "post_attention_layernorm",
            **{name: stored for name, stored in _LINEAR_LAYER.items() if not name.startswith("in_proj_")},
            **{f"in_proj_{name}": f"linear_attn.{name}_proj" for name in ("q", "k", "v", "a", "b")},
            "in_proj_z": "linear_attn.g_proj",
            "gated_norm": "linear_attn.o_norm",
            "out_proj": "linear_attn.o_proj",
        },
        structure=OLMO_HYBRID,
        defaults={"linear_conv_kernel_dim": 4, "linear_allow_neg_eigval": True},
        other_names={
            "attention_norm": "attention_layer_norm",
            **dict.fromkeys(("mlp_norm", "post_attention_norm"), "feedforward_layer_norm"),
        },
        conv_parts=tuple(f"linear_attn.{name}_conv1d" for name in ("q", "k", "v")),
    ),
    "Exaone4ForCausalLM": _EXAONE4,
    "CohereForCausalLM": replace(_COHERE, defaults={**_COHERE.defaults, "rope_theta": 5e5}),
    "Cohere2ForCausalLM": replace(_COHERE, defaults={**_COHERE.defaults, **_SLIDING}),
    "Cohere2MoeForCausalLM": replace(
        _COHERE,
        aliases={"n_shared_experts": "num_shared_experts"},
        fixed={
            "mlp_only_layers": None,
            "decoder_sparse_step": None,
            "routed_scaling_factor": None,
            "n_group": None,
            "topk_group": None,
            "scoring_func": None,
            "rope_scaling": None,
        },
        defaults={
            **_COHERE.defaults,
            **_SLIDING,
            "head_dim": 128,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "num_shared_experts": 0,
            "expert_selection_fn": "softmax",
            "norm_topk_prob": True,
            "shared_expert_combination_strategy": "average",
            "sliding_window_pattern": 4,
            "prefix_dense_sliding_window_pattern": 1,
        },
    ),
    # Q, K and V are one matrix; gate and up are another.
    "Phi3ForCausalLM": Family(
        _LAYER
        | dict.fromkeys(("q_proj", "k_proj", "v_proj"), "self_attn.qkv_proj")
        | dict.fromkeys(("gate_proj", "up_proj"), "mlp.gate_up_proj"),
        fixed={**_ONE_WINDOW, **_NO_BIAS},
        defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096, "sliding_window": None},
    ),
    "GPT2LMHeadModel": Family(
        layer={
            "attention_norm": "ln_1",
            **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "attn.c_attn"),
            "o_proj": "attn.c_proj",
            "mlp_norm": "ln_2",
            "up_proj": "mlp.c_fc",
            "down_proj": "mlp.c_proj",
        },
        top=_GPT2_TOP,
        prefix="transformer.",
        qkv_bias=True,
        transposed=True,
        defaults={"activation_function": "gelu_new"},
    ),
    "MixtralForCausalLM": Family(
        _LAYER | {"router": "block_sparse_moe.gate", "experts": "block_sparse_moe.experts"},
        _W123,
        defaults={"norm_topk_prob": True, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None},
    ),
    # The second name is that of published files.
    "PhimoeForCausalLM": _PHIMOE,
    "PhiMoEForCausalLM": _PHIMOE,
    "Qwen2MoeForCausalLM": Family(
        _LAYER | {"shared_expert": "mlp.shared_expert"},
        aliases={"attention_bias": "qkv_bias"},
        output_bias=False,
        defaults={**_QWEN_WINDOWS, "qkv_bias": True, "shared_expert_gate": True},
    ),
    "OlmoeForCausalLM": Family(structure=JOINT_NORMS, defaults={"rms_norm_eps": 1e-5}),
    "Dots1ForCausalLM": Family(
        structure=HEAD_NORMS, sigmoid_router=True, defaults={"sliding_window": 4096, "max_window_layers": 62}
    ),
    "SolarOpenForCausalLM": Family(
        output_bias=False,
        sigmoid_router=True,
        defaults={
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "norm_topk_prob": True,
            "n_shared_experts": 1,
        },
    ),
    "MellumForCausalLM": Family(
        structure=MELLUM,
        fixed={"use_sliding_window": True, "decoder_sparse_step": None, "mlp_only_layers": None},
        defaults={
            "head_dim": 128,
            "num_key_value_heads": 4,
            "sliding_window": 1024,
            "norm_topk_prob": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "Qwen3MoeForCausalLM": Family(structure=HEAD_NORMS, defaults={"use_sliding_window": False, "sliding_window": 4096}),
    "Glm4MoeForCausalLM": _GLM4_MOE,
    "MiniMaxM2ForCausalLM": Family(
        _LAYER
        | {
            "router": "block_sparse_moe.gate",
            "router_bias": "block_sparse_moe.e_score_correction_bias",
            "experts": "block_sparse_moe.experts",
        },
        _W123,
        structure=JOINT_NORMS,
        sigmoid_router=True,
        defaults={"rope_theta": 5e6, "norm_topk_prob": True},
    ),
    "AfmoeForCausalLM": Family(
        _LAYER
        | {
            "post_attention_norm": "post_attention_layernorm",
            "mlp_norm": "pre_mlp_layernorm",
            "post_mlp_norm": "post_mlp_layernorm",
            "router": "mlp.router.gate",
            "router_bias": "mlp.expert_bias",
        },
        structure=AFMOE,
        aliases={
            "n_shared_experts": "num_shared_experts",
            "routed_scaling_factor": "route_scale",
            "sliding_window_pattern": "global_attn_every_n_layers",
        },
        sigmoid_router=True,
        defaults={
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "num_dense_layers": 1,
            "num_experts": 64,
            "num_experts_per_tok": 6,
            "n_shared_experts": 2,
            "moe_intermediate_size": 1408,
            "sliding_window": 1024,
            "mup_enabled": False,
        },
        fixed={"n_group": 1, "topk_group": 1, "norm_topk_prob": True},
    ),
    # The second name is that of published files.
    "ExaoneMoeForCausalLM": _EXAONE_MOE,
    "ExaoneMoEForCausalLM": _EXAONE_MOE,
    "HYV3ForCausalLM": Family(
        _LAYER
        | {
            "router": "mlp.router.gate",
            "router_bias": "mlp.expert_bias",
            "shared_expert": "mlp.shared_mlp",
        },
        structure=HEAD_NORMS,
        aliases={"n_shared_experts": "num_shared_experts", "routed_scaling_factor": "router_scaling_factor"},
        sigmoid_router=True,
        defaults={
            "head_dim": 128,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 11_158_840.0,
            "num_experts": 192,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "moe_intermediate_size": 1536,
            "routed_scaling_factor": 2.826,
        },
        fixed={"n_group": 1, "topk_group": 1, "norm_topk_prob": True, "first_k_dense_replace": 1},
    ),
    "MiMoV2FlashForCausalLM": Family(
        _LAYER | {"sinks": "self_attn.attention_sink_bias"},
        structure=MIMO,
        output_bias=False,
        sigmoid_router=True,
        defaults={
            "num_key_value_heads": 4,
            "head_dim": 192,
            "v_head_dim": 128,
            "rms_norm_eps": 1e-5,
            "sliding_window": 129,
            "attention_value_scale": 0.707,
            "norm_topk_prob": True,
        },
        # Rotary settings are read from rope_parameters alone.
        fixed={
            "n_shared_experts": None,
            "first_k_dense_replace": 1,
            "moe_layer_freq": None,
            "partial_rotary_factor": 0.334,
            "rope_scaling": None,
        },
    ),
    "FlexOlmoForCausalLM": replace(
        _OLMO2, defaults={"rope_theta": 5e5, "num_experts": 7, "num_experts_per_tok": 5, "norm_topk_prob": False}
    ),
    "GptOssForCausalLM": Family(
        _LAYER | {"router": "mlp.router"},
        structure=GPT_OSS,
        defaults={
            "head_dim": 64,
            "sliding_window": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "attention_bias": True,
            "mlp_bias": True,
            "norm_topk_prob": True,
        },
        activation="clamped_swiglu",
        stacked=_STACKED,
        stacked_order="in_out",
    ),
    "Step3p5ForCausalLM": _STEP,
    "Kolibri1ForCausalLM": Family(
        _LAYER
        | {
            "post_attention_norm": "post_attn_norm",
            "post_mlp_norm": "post_ffn_norm",
            "router_bias": "moe.router.expert_bias",
        },
        structure=KOLIBRI,
        sigmoid_router=True,
        defaults={
            "num_key_value_heads": 4,
            "head_dim": 128,
            "sliding_window": 513,
            "num_experts": 384,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
        # Of other families, whose settings its program does not read.
        fixed={
            "attention_bias": False,
            "mlp_bias": False,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": None,
            "first_k_dense_replace": 0,
            "decoder_sparse_step": None,
            "mlp_only_layers": None,
            "mlp_layer_types": None,
            "moe_layer_freq": None,
            "use_sliding_window": True,
        },
    ),
    "LagunaForCausalLM": Family(
        _LAYER
        | {
            "output_gate": "self_attn.g_proj",
            "router_bias": "mlp.experts.e_score_correction_bias",
            "shared_expert": "mlp.shared_expert",
        },
        structure=LAGUNA,
        sigmoid_router=True,
        aliases={"routed_scaling_factor": "moe_routed_scaling_factor"},
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "sliding_window": 512,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        fixed={
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "first_k_dense_replace": 0,
            "moe_layer_freq": None,
        },
    ),
    "Qwen3_5ForCausalLM": _QWEN3_5,
    "DeepseekV2ForCausalLM": Family(
        _LAYER | _LATENT_LAYER,
        structure=LATENT,
        defaults={"n_shared_experts": 2},
        fixed={"n_group": 1, "topk_group": 1},  # of another method
    ),
    "DeepseekV3ForCausalLM": Family(
        _LAYER | _LATENT_LAYER,
        structure=LATENT,
        sigmoid_router=True,
        defaults=_DEEPSEEK_EXPERTS,
    ),
    "DeepseekV32ForCausalLM": Family(
        _LAYER | _LATENT_LAYER | _INDEXER,
        structure=LATENT,
        sigmoid_router=True,
        defaults={
            **_DEEPSEEK_EXPERTS,
            "first_k_dense_replace": 3,
            "index_n_heads": 64,
            "index_head_dim": 128,
            "index_topk": 2048,
        },
    ),
    "GlmMoeDsaForCausalLM": Family(
        _LAYER | _LATENT_LAYER | _INDEXER,
        structure=LATENT,
        sigmoid_router=True,
        defaults={
            "rms_norm_eps": 1e-5,
            "norm_topk_prob": True,
            "n_shared_experts": 1,
            "routed_scaling_factor": 2.5,
            "first_k_dense_replace": 3,
            "index_n_heads": 32,
            "index_head_dim": 128,
            "index_topk": 2048,
        },
    ),
    "Mistral4ForCausalLM": Family(
        _LAYER | _LATENT_LAYER,
        structure=LATENT,
        defaults={"norm_topk_prob": True, "n_shared_experts": 1},
        query_growth=True,
        stacked=_STACKED,
    ),
    "Glm4MoeLiteForCausalLM": Family(
        _LAYER | _LATENT_LAYER,
        structure=LATENT,
        sigmoid_router=True,
        defaults={
            "rms_norm_eps": 1e-5,
            "norm_topk_prob": True,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.8,
        },
    ),
    "YoutuForCausalLM": Family(_LAYER | _LATENT_LAYER, structure=LATENT),
    "MiniCPM3ForCausalLM": Family(
        _LAYER | _LATENT_LAYER,
        structure=MINICPM3,
        defaults={"rms_norm_eps": 1e-5, "scale_emb": 12.0, "scale_depth": 1.4, "dim_model_base": 256},
    ),
    "AXK1ForCausalLM": Family(
        _LAYER | _LATENT_LAYER | {"post_mlp_norm": "post_mlp_layernorm"},
        structure=AXK1,
        sigmoid_router=True,
        optional_router_bias=True,
        fixed={"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
        defaults={
            **_DEEPSEEK_EXPERTS,
            "first_k_dense_replace": 1,
        },
    ),
    "KimiLinearForCausalLM": Family(
        {name: stored.replace("mlp.", "block_sparse_moe.") for name, stored in _LAYER.items()}
        | _LATENT_LAYER
        | _KIMI_DELTA_LAYER
        | {name: f"mlp.{name}" for name in _EXPERT},
        structure=KIMI_LINEAR,
        aliases={
            "max_position_embeddings": "model_max_length",
            "norm_topk_prob": "moe_renormalize",
            "n_group": "num_expert_group",
            "num_experts_per_tok": "num_experts_per_token",
            "n_shared_experts": "num_shared_experts",
        },
        sigmoid_router=True,
        expert=_W123,
        shared=_EXPERT,
        defaults={
            "rms_norm_eps": 1e-5,
            "norm_topk_prob": True,
            "n_shared_experts": 1,
            "routed_scaling_factor": 2.446,
            "first_k_dense_replace": 1,
            "linear_conv_kernel_dim": 4,
        },
        fixed={"rope_parameters": None, "rope_scaling": None},
        # As transformers writes it.
        other_names={name: f"block_sparse_moe.{name}" for name in _EXPERT},
        conv_parts=tuple(f"self_attn.{name}_conv1d" for name in ("q", "k", "v")),
    ),
    "BailingHybridForCausalLM": Family(
        {
            name: stored.replace("self_attn.", "attention.")
            for name, stored in (_LAYER | _LATENT_LAYER | _KIMI_DELTA_LAYER).items()
        }
        | {
            "o_proj": "attention.dense",
            "out_proj": "attention.dense",
            # Of layers with linear attention, and of the others.
            "in_proj_z": "attention.g_proj",
            "output_gate": "attention.g_proj",
            "in_proj_a": "attention.f_proj",
            "router_bias": "mlp.gate.expert_bias",
        },
        top=_TOP | {"embedding": "model.word_embeddings"},
        structure=BAILING_HYBRID,
        aliases={
            "max_position_embeddings": "model_max_length",
            "norm_topk_prob": "moe_renormalize",
            "n_group": "num_expert_group",
            "num_local_experts": "num_experts",
            "num_experts_per_tok": "num_experts_per_token",
            "n_shared_experts": "num_shared_experts",
        },
        sigmoid_router=True,
        defaults={
            **_DEEPSEEK_EXPERTS,
            "head_dim": 128,
            "rope_theta": 6e6,
            "first_k_dense_replace": 2,
            "layer_group_size": 6,
            "short_conv_kernel_size": 4,
            "kda_safe_gate": True,
            "kda_lower_bound": -5.0,
        },
        fixed={"rope_interleave": True, "mlp_bias": False, "n_routed_experts": None},
        conv_parts=tuple(f"attention.{name}_conv1d" for name in ("q", "k", "v")),
    ),
    "AriaTextForCausalLM": Family(
        _LAYER | {"router": "mlp.router"},
        # The width is that of an expert.
        aliases={
            "num_experts": "moe_num_experts",
            "num_experts_per_tok": "moe_topk",
            "n_shared_experts": "moe_num_shared_experts",
            "moe_intermediate_size": "intermediate_size",
        },
        defaults={"moe_num_experts": 8, "moe_topk": 2, "moe_num_shared_experts": 2, "norm_topk_prob": True},
        stacked={"gate_proj": "fc1.weight", "up_proj": "fc1.weight", "down_proj": "fc2.weight"},
        stacked_order="in_out",
    ),
    "Qwen3_5MoeForCausalLM": _QWEN3_5_MOE,
    # The rows of the matrices of linear attention are ordered by key head.
    "Qwen3NextForCausalLM": replace(
        _QWEN3_5_MOE,
        layer={
            **_QWEN3_5_MOE.layer,
            **dict.fromkeys(("in_proj_qkv", "in_proj_z"), "linear_attn.in_proj_qkvz"),
            **dict.fromkeys(("in_proj_a", "in_proj_b"), "linear_attn.in_proj_ba"),
        },
    ),
    "GraniteForCausalLM": Family(),
    "HyperCLOVAXForCausalLM": Family(
        _LAYER | {"post_attention_norm": "post_norm1", "post_mlp_norm": "post_norm2"}, structure=POST_NORMS
    ),
    "GraniteMoeForCausalLM": _GRANITE_MOE,
    "GraniteMoeSharedForCausalLM": _GRANITE_MOE,
    "GraniteSWAForCausalLM": Family(structure=GRANITE_SWA, defaults=_GRANITE_SWA),
    "GraniteMoeSWAForCausalLM": Family(
        _LAYER
        | {
            "router": "block_sparse_moe.router",
            "experts": "block_sparse_moe.experts",
            "shared_expert": "shared_mlp",
        },
        _GRANITE_SHARED,
        structure=GRANITE_SWA,
        stacked=_STACKED,
        defaults={
            **_GRANITE_SWA,
            "norm_topk_prob": True,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 2048,
        },
    ),
    "Lfm2ForCausalLM": replace(
        _LFM2,
        defaults={
            **_LFM2.defaults,
            "block_auto_adjust_ff_dim": True,
            "block_ffn_dim_multiplier": 1.0,
            "block_multiple_of": 256,
        },
    ),
    "Lfm3ForCausalLM": _LFM3,
    "Lfm2MoeForCausalLM": replace(
        _LFM2,
        sigmoid_router=True,
        defaults={**_LFM2.defaults, "norm_topk_prob": True, "use_expert_bias": True, "num_dense_layers": 2},
    ),
    "GraniteMoeHybridForCausalLM": replace(
        _GRANITE_MOE,
        layer={
            **_GRANITE_MOE.layer,
            **_MAMBA_LAYER,
            **{name: f"shared_mlp.{stored}" for name, stored in _GRANITE_SHARED.items()},
        },
        structure=GRANITE_HYBRID,
        defaults={
            "norm_topk_prob": True,
            "mamba_n_groups": 1,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_conv_bias": True,
            "mamba_proj_bias": False,
        },
    ),
    "NemotronHForCausalLM": Family(
        # A layer of the file has one norm, and attention, Mamba-2, an MLP or experts.
        {name: stored.replace("self_attn.", "mixer.").replace("mlp.", "mixer.") for name, stored in _LAYER.items()}
        | {name: stored.replace("mamba.", "mixer.") for name, stored in _MAMBA_LAYER.items()}
        | {"attention_norm": "norm", "mlp_norm": "norm"}
        | {"experts_input": "mixer.fc1_latent_proj", "experts_output": "mixer.fc2_latent_proj"},
        top=_TOP | {"embedding": "model.embeddings", "norm": "model.norm_f"},
        structure=NEMOTRON_H,
        # Names that files of other programs have, and that come first in transformers.
        aliases={
            "n_groups": "mamba_n_groups",
            "conv_kernel": "mamba_d_conv",
            "use_conv_bias": "mamba_conv_bias",
            "time_step_min": "mamba_dt_min",
        },
        activation="relu2",
        gated=False,
        sigmoid_router=True,
        epsilon="layer_norm_epsilon",
        defaults={
            "head_dim": 128,
            "intermediate_size": 21504,
            "layer_norm_epsilon": 1e-5,
            "norm_topk_prob": True,
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "ssm_state_size": 128,
            "n_groups": 8,
            "conv_kernel": 4,
            "use_conv_bias": True,
            "use_bias": False,
            "time_step_min": 0.001,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 7688,
            "moe_shared_expert_intermediate_size": 7688,
        },
    ),
    "FalconH1ForCausalLM": Family(
        {name: stored.replace("mlp.", "feed_forward.") for name, stored in _LAYER.items()}
        | _MAMBA_LAYER
        | {"mlp_norm": "pre_ff_layernorm"},
        top=_TOP | {"norm": "model.final_layernorm"},
        structure=FALCON_H1,
        defaults={
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "mamba_d_ssm": 1024,
            "mamba_n_heads": 128,
            "mamba_n_groups": 1,
            "mamba_d_state": 256,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_conv_bias": True,
            "mamba_proj_bias": False,
            "mamba_norm_before_gate": True,
            "mamba_rms_norm": False,
        },
    ),
    # The language models within models of text and images.
    "Gemma3ForConditionalGeneration": _GEMMA3,
    "Gemma4ForConditionalGeneration": _GEMMA4,
    "Gemma4UnifiedForConditionalGeneration": _GEMMA4_UNIFIED,
    "Exaone4_5_ForConditionalGeneration": _EXAONE4,
    "Glm4vForConditionalGeneration": _GLM4V,
    "Glm46VForConditionalGeneration": _GLM4V,
    "Glm4vMoeForConditionalGeneration": replace(
        _GLM4_MOE,
        defaults={
            **_GLM4_MOE.defaults,
            "num_key_value_heads": 8,
            "attention_bias": True,
            "first_k_dense_replace": 1,
        },
        stacked=_STACKED,
    ),
    "Mistral3ForConditionalGeneration": _MISTRAL,
    "Qwen2_5_VLForConditionalGeneration": _QWEN2_VL,
    "Qwen2VLForConditionalGeneration": _QWEN2_VL,
    "Qwen3VLForConditionalGeneration": Family(structure=HEAD_NORMS, defaults={"rope_theta": 5e5}),
    "Qwen3VLMoeForConditionalGeneration": Family(
        structure=HEAD_NORMS,
        stacked=_STACKED,
        # Files of transformers 4 have [experts, in_features, out_features].
        stacked_order="any",
        defaults={"rope_theta": 5e5, "norm_topk_prob": True},
    ),
    "Qwen3_5ForConditionalGeneration": _QWEN3_5,
    "Qwen3_5MoeForConditionalGeneration": _QWEN3_5_MOE,
    "Step3p7ForConditionalGeneration": _STEP,
    "MuseGlimmerForConditionalGeneration": Family(
        _LAYER | _POST_NORMS,
        structure=MUSE_GLIMMER,
        norm_offset=1.0,
        plain_last_norm=True,
        defaults={
            "rms_norm_eps": 1e-5,
            "post_norm_eps": 1e-8,
            "sliding_window": 2048,
            "hidden_activation": "silu",
            "final_logit_softcapping": 20.0,
            "qk_scale_factor": 3.87,
            "output_multiplier": 0.19611613513818404,
        },
    ),
}

# Other names that files have for an architecture, with the usual ones.
RENAMED = {
    "BailingMoeV3ForCausalLM": "BailingHybridForCausalLM",
    "Ernie4_5_ForCausalLM": "Ernie4_5ForCausalLM",
}
