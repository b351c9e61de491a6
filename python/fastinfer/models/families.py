"""Families of Hugging Face checkpoints: names of their tensors, and properties that config.json does not have."""

from collections.abc import Mapping
from dataclasses import dataclass, field

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
    "router": "mlp.gate",
    "experts": "mlp.experts",
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
        top: the same for tensors outside the layers, and ``layers`` for the layers themselves.
        prefix: prefix of all names, which some checkpoints leave out.
        qkv_bias: whether Q, K and V have a bias although config.json does not say so.
        qk_norm, post_norms: see :class:`fastinfer.models.config.ModelConfig`.
        norm_offset: number added to the stored weights of RMSNorms.
        scaled_embedding: whether the embedding is multiplied by the square root of the hidden size.
        transposed: whether matrices are stored as [in_features, out_features].
    """

    layer: Mapping[str, str] = field(default_factory=lambda: _LAYER)
    top: Mapping[str, str] = field(default_factory=lambda: _TOP)
    prefix: str = "model."
    qkv_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    norm_offset: float = 0.0
    scaled_embedding: bool = False
    transposed: bool = False


_GEMMA2 = Family(_LAYER | _POST_NORMS, post_norms=True, norm_offset=1.0, scaled_embedding=True)

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(),
    "Qwen2ForCausalLM": Family(qkv_bias=True),
    "Qwen3ForCausalLM": Family(qk_norm=True),
    "Gemma2ForCausalLM": _GEMMA2,
    "Gemma3ForCausalLM": Family(_GEMMA2.layer, qk_norm=True, post_norms=True, norm_offset=1.0, scaled_embedding=True),
    # Q, K and V are one matrix; gate and up are another.
    "Phi3ForCausalLM": Family(
        _LAYER
        | dict.fromkeys(("q_proj", "k_proj", "v_proj"), "self_attn.qkv_proj")
        | dict.fromkeys(("gate_proj", "up_proj"), "mlp.gate_up_proj")
    ),
    "GPT2LMHeadModel": Family(
        {
            "attention_norm": "ln_1",
            **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "attn.c_attn"),
            "o_proj": "attn.c_proj",
            "mlp_norm": "ln_2",
            "up_proj": "mlp.c_fc",
            "down_proj": "mlp.c_proj",
        },
        _GPT2_TOP,
        prefix="transformer.",
        qkv_bias=True,
        transposed=True,
    ),
    "MixtralForCausalLM": Family(
        _LAYER
        | {
            "router": "block_sparse_moe.gate",
            "experts": "block_sparse_moe.experts",
            "gate_proj": "w1",
            "up_proj": "w3",
            "down_proj": "w2",
        }
    ),
    "Qwen3MoeForCausalLM": Family(
        _LAYER | {"gate_proj": "gate_proj", "up_proj": "up_proj", "down_proj": "down_proj"}, qk_norm=True
    ),
}
