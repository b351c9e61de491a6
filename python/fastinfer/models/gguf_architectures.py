"""Architectures of GGUF files: properties that the metadata does not have."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fastinfer.models.structure import (
    AFMOE,
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
    LAGUNA,
    LATE_HEAD_NORMS,
    LATENT,
    LAYER_NORMS,
    LFM2,
    LLAMA4,
    MELLUM,
    MIMO,
    MINICPM3,
    MUSE_GLIMMER,
    NEMOTRON_H,
    OLMO,
    OLMO2,
    PHI,
    QWEN3_NEXT,
    STEP,
    Structure,
)


@dataclass(frozen=True)
class Architecture:
    """Properties of an architecture that its files do not contain.

    Attributes:
        structure: structure of the layers.
        permuted: whether the converter has interleaved the rotated pairs of Q's and K's rows.
        no_rope_period: in every n-th layer Q and K are not rotated; 0 for none.
        local_rope_theta: base in the layers with a window, where it is another one.
        mlp_norm: the file's name of the norm before the MLP.
        names: the file's names of other parts, where they are not the usual ones.
        suffixes: ends of the names of vectors, likewise.
        conv_parts: names of the filters of queries, keys and values, in files that do not have them as one tensor.
        truncated_yarn: whether the limits of YaRN's ramp are rounded to whole dimensions.
        activation, gated, qkv_bias: see :class:`fastinfer.models.config.ModelConfig`.
        sigmoid_router: whether experts are chosen by sigmoids if the file does not say it.
        renormalizes: whether the weights of the chosen experts are divided by their sum if the file does not say it.
        shared_expert_gate: see :class:`fastinfer.models.config.ModelConfig`.
        other_biases: whether the other projections have a bias, too.
        learned_positions: whether positions are learned, and nothing is rotated.
        window: length of the attention windows in files that do not say it.
        counts_dense: whether the file says how many of the first layers have no experts; if not, they are those without
            a router.
        tiled_values: whether the converter has reordered the value heads of linear attention, see
            :func:`fastinfer.models.checkpoint.tiled_rows`.
    """

    structure: Structure = field(default_factory=Structure)
    permuted: bool = False
    no_rope_period: int = 0
    local_rope_theta: float | None = None
    mlp_norm: str = "ffn_norm"
    names: Mapping[str, str] = field(default_factory=dict)
    suffixes: Mapping[str, str] = field(default_factory=dict)
    conv_parts: tuple[str, ...] = ()
    truncated_yarn: bool = True
    activation: str = "silu"
    gated: bool = True
    qkv_bias: bool = False
    sigmoid_router: bool = False
    renormalizes: bool = True
    shared_expert_gate: bool = False
    other_biases: bool = False
    learned_positions: bool = False
    window: int = 0
    counts_dense: bool = True
    tiled_values: bool = False


_RELU2 = Architecture(LAYER_NORMS, activation="relu2", gated=False)

_SHORT_CONV = {
    "norm": "token_embd_norm",
    "in_proj": "shortconv.in_proj",
    "conv1d": "shortconv.conv",
    "out_proj": "shortconv.out_proj",
}

# A layer of the file has one norm.
_NEMOTRON_H = Architecture(NEMOTRON_H, mlp_norm="attn_norm", activation="relu2", gated=False, sigmoid_router=True)

_DFLASH = {
    "hidden_norm": "enc.output_norm",
    "attention_conv": "attn_conv_proj",
    "attention_conv_base": "attn_conv_base",
    "mlp_conv": "ffn_conv_proj",
    "mlp_conv_base": "ffn_conv_base",
} | {
    name: name
    for name in ("fc", "selector_hidden", "selector_predecessor", "selector_successor", "markov_w1", "markov_w2")
}

_KIMI_DELTA = {
    "in_proj_q": "attn_q",
    "in_proj_k": "attn_k",
    "in_proj_v": "attn_v",
    "in_proj_a": "ssm_f_a",
    "in_proj_a_up": "ssm_f_b",
    "in_proj_z": "ssm_g_a",
    "in_proj_z_up": "ssm_g_b",
    "out_proj": "attn_output",
}
_KIMI_CONVS = tuple(f"ssm_conv1d_{name}" for name in "qkv")

_INDEXER = {
    "index_q_proj": "indexer.attn_q_b",
    "index_k_proj": "indexer.attn_k",
    "index_k_norm": "indexer.k_norm",
    "index_weights": "indexer.proj",
}

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(permuted=True),
    "mistral3": Architecture(permuted=True),
    "llama4": Architecture(LLAMA4, no_rope_period=4, sigmoid_router=True, renormalizes=False, counts_dense=False),
    "qwen2": Architecture(qkv_bias=True),
    "qwen3": Architecture(HEAD_NORMS),
    "qwen2moe": Architecture(qkv_bias=True, renormalizes=False, shared_expert_gate=True),
    "qwen3moe": Architecture(HEAD_NORMS),
    # The text parts of models that read images.
    "qwen2vl": Architecture(qkv_bias=True),
    "qwen3vl": Architecture(HEAD_NORMS),
    "qwen3vlmoe": Architecture(HEAD_NORMS),
    "qwen3next": Architecture(QWEN3_NEXT, mlp_norm="post_attention_norm", shared_expert_gate=True),
    "qwen35": Architecture(QWEN3_NEXT, mlp_norm="post_attention_norm", tiled_values=True),
    "qwen35moe": Architecture(QWEN3_NEXT, mlp_norm="post_attention_norm", shared_expert_gate=True, tiled_values=True),
    "granite": Architecture(permuted=True),
    "granitemoe": Architecture(permuted=True),
    "granite_swa": Architecture(GRANITE_SWA, permuted=True),
    "granitehybrid": Architecture(GRANITE_HYBRID, permuted=True),
    "falcon-h1": Architecture(FALCON_H1, suffixes={"mlp_norm": ""}),
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": _NEMOTRON_H,
    "glm4moe": Architecture(mlp_norm="post_attention_norm"),
    "afmoe": Architecture(
        replace(AFMOE, scaled_embedding=True), names={"output_gate": "attn_gate"}, sigmoid_router=True
    ),
    # The scale of queries is in the weights of their norm.
    "muse-glimmer": Architecture(
        replace(MUSE_GLIMMER, qk_norm="head"), permuted=True, names={"output_gate": "attn_gate"}
    ),
    "exaone-moe": Architecture(EXAONE_MOE, sigmoid_router=True),
    "mimo2": Architecture(MIMO, sigmoid_router=True, counts_dense=False),
    "step35": Architecture(STEP, names={"output_gate": "attn_gate"}, sigmoid_router=True, counts_dense=False),
    "laguna": Architecture(LAGUNA, names={"output_gate": "attn_gate"}, sigmoid_router=True),
    "hy_v3": Architecture(HEAD_NORMS, suffixes={"router_bias": ""}, sigmoid_router=True, counts_dense=False),
    "minimax-m2": Architecture(JOINT_NORMS),
    "deepseek2": Architecture(LATENT, renormalizes=False),
    "glm-dsa": Architecture(LATENT, names=_INDEXER, sigmoid_router=True),
    "deepseek32": Architecture(LATENT, names=_INDEXER, sigmoid_router=True),
    "mistral4": Architecture(LATENT, renormalizes=False),
    "minicpm3": Architecture(MINICPM3),
    "kimi-linear": Architecture(
        KIMI_LINEAR,
        no_rope_period=1,
        names=_KIMI_DELTA,
        conv_parts=_KIMI_CONVS,
        sigmoid_router=True,
    ),
    "bailingmoe3": Architecture(
        BAILING_HYBRID,
        names={**_KIMI_DELTA, "output_gate": "attn_gate"},
        conv_parts=_KIMI_CONVS,
        sigmoid_router=True,
    ),
    # Draft heads.
    "eagle3": Architecture(permuted=True, names={"feature_norm": "attn_norm_2", "fc": "fc"}),
    "dflash": Architecture(HEAD_NORMS, names=_DFLASH),
    "smollm3": Architecture(permuted=True, no_rope_period=4),
    "apertus": Architecture(HEAD_NORMS, activation="xielu", gated=False),
    "arcee": Architecture(permuted=True, activation="relu2", gated=False),
    "seed_oss": Architecture(mlp_norm="post_attention_norm"),
    "ernie4_5": Architecture(INTERLEAVED),
    "ernie4_5-moe": Architecture(INTERLEAVED),
    "chatglm": Architecture(INTERLEAVED),
    "glm4": Architecture(GLM4),
    "starcoder2": Architecture(LAYER_NORMS, activation="gelu_tanh", gated=False),
    "stablelm": Architecture(LAYER_NORMS),
    "olmoe": Architecture(JOINT_NORMS, renormalizes=False),
    "hunyuan-dense": Architecture(LATE_HEAD_NORMS),
    "hunyuan-moe": Architecture(LATE_HEAD_NORMS),
    "nemotron": _RELU2,
    "jais2": _RELU2,
    "phi2": Architecture(PHI, mlp_norm="attn_norm", activation="gelu_tanh", gated=False),
    "gptneox": Architecture(GPT_NEOX, activation="gelu", gated=False),
    "mellum": Architecture(replace(MELLUM, only_full_scaled=True)),
    "dots1": Architecture(HEAD_NORMS, sigmoid_router=True),
    "gemma": Architecture(GEMMA, activation="gelu_tanh"),
    "gemma2": Architecture(GEMMA2, activation="gelu_tanh", window=4096),
    # Its predecessors' base in the layers with a window.
    "gemma3": Architecture(GEMMA3, activation="gelu_tanh", local_rope_theta=10000.0),
    "gemma4": Architecture(GEMMA4, activation="gelu_tanh"),
    "olmo": Architecture(OLMO, permuted=True),
    "olmo2": Architecture(OLMO2),
    "exaone4": Architecture(EXAONE4),
    "command-r": Architecture(COHERE, mlp_norm="attn_norm"),
    "cohere2": Architecture(COHERE, mlp_norm="attn_norm"),
    "cohere2moe": Architecture(COHERE, mlp_norm="attn_norm", sigmoid_router=True),
    "lfm2": Architecture(LFM2, names=_SHORT_CONV),
    "lfm2moe": Architecture(LFM2, names=_SHORT_CONV),
    "phi3": Architecture(),
    "phimoe": Architecture(LAYER_NORMS),
    "gpt-oss": Architecture(
        GPT_OSS,
        mlp_norm="post_attention_norm",
        truncated_yarn=False,
        activation="clamped_swiglu",
        qkv_bias=True,
        other_biases=True,
        window=128,
    ),
    "gpt2": Architecture(
        Structure(norm="layer_norm"),
        activation="gelu_tanh",
        gated=False,
        qkv_bias=True,
        other_biases=True,
        learned_positions=True,
    ),
}
