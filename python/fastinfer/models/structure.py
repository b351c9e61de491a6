"""Structure of the layers of known families, which the files of no format say."""

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Structure:
    """Structure of a family's layers.

    Attributes:
        norm, norm_bias, norm_weights, pre_norms, post_norms, state_pre_norms, qk_norm, rotated_first, v_norm,
            layer_scales, parallel, interleaved_rope, reversed_rope, attention_sinks, output_gate, separate_gate,
            head_gate, softplus_gate, normed_embedding, alternating_gate_up, lm_head_bias, experts_post_norm: see
            :class:`fastinfer.models.config.ModelConfig`.
        scaled_embedding: whether the embedding is multiplied by the square root of the hidden size.
        window_period: every n-th layer has full attention, the others a window, in models with windows whose files do
            not say more; 0 for a window in all layers.
        only_windows_rotate: whether layers without a window are not rotated, in models with windows.
        only_full_scaled: whether the scaling of rotary frequencies is for layers without a window only.
        latent_attention: whether the layers without a state have multi-head latent attention.
        linear_period: every n-th layer has full attention, the others linear attention, in files that do not say more;
            0 for full attention in all layers.
        mamba2: whether some layers are of Mamba-2, in the place of attention or beside it.
        short_convs: whether some layers have a short convolution in the place of attention.
    """

    norm: str = "rms_norm"
    norm_bias: bool = True
    norm_weights: bool = True
    pre_norms: bool = True
    post_norms: bool = False
    state_pre_norms: bool = False
    qk_norm: str = "none"
    rotated_first: bool = False
    v_norm: bool = False
    layer_scales: bool = False
    parallel: bool = False
    interleaved_rope: bool = False
    reversed_rope: bool = False
    attention_sinks: bool = False
    alternating_gate_up: bool = False
    scaled_embedding: bool = False
    window_period: int = 0
    only_windows_rotate: bool = False
    only_full_scaled: bool = False
    output_gate: bool = False
    linear_period: int = 0
    separate_gate: bool = False
    head_gate: bool = False
    softplus_gate: bool = False
    normed_embedding: bool = False
    mamba2: bool = False
    short_convs: bool = False
    latent_attention: bool = False
    lm_head_bias: bool = False
    experts_post_norm: bool = False

    def config_fields(self, hidden_size: int) -> dict[str, Any]:
        """Return the fields of a :class:`fastinfer.models.config.ModelConfig` that follow from the structure."""
        same = (
            "norm",
            "norm_bias",
            "norm_weights",
            "pre_norms",
            "post_norms",
            "state_pre_norms",
            "qk_norm",
            "rotated_first",
            "v_norm",
            "layer_scales",
            "parallel",
            "interleaved_rope",
            "reversed_rope",
            "attention_sinks",
            "alternating_gate_up",
            "output_gate",
            "separate_gate",
            "head_gate",
            "softplus_gate",
            "normed_embedding",
            "lm_head_bias",
            "experts_post_norm",
        )
        scale = hidden_size**0.5 if self.scaled_embedding else 1.0
        return {**{name: getattr(self, name) for name in same}, "embedding_scale": scale}

    def unrotated_layers(self, windows: tuple[int, ...]) -> frozenset[int]:
        """Return the layers whose queries and keys are not rotated, given the windows of all layers."""
        if not (self.only_windows_rotate and any(windows)):
            return frozenset()
        return frozenset(layer for layer, window in enumerate(windows) if not window)


def periodic_windows(window: int, period: int, num_layers: int) -> tuple[int, ...]:
    """Return the windows of all layers if every ``period``-th has full attention, or none with a period of 0."""
    return tuple(0 if period and (layer + 1) % period == 0 else window for layer in range(num_layers))


def shared_kv_layers(windows: tuple[int, ...], num_shared: int) -> tuple[int, ...] | None:
    """Return the layer whose keys and values each layer attends to, if the last ones have none of their own.

    They attend to those of the last layer before them with the same window; ``None`` if one of them finds none.
    """
    first = len(windows) - num_shared
    last = {window: layer for layer, window in enumerate(windows[:first])}
    if any(window not in last for window in windows[first:]):
        return None
    return (*range(first), *(last[window] for window in windows[first:]))


HEAD_NORMS = Structure(qk_norm="head")
JOINT_NORMS = Structure(qk_norm="all")
LATE_HEAD_NORMS = Structure(qk_norm="head", rotated_first=True)
# The files say which layers have a window.
MELLUM = replace(HEAD_NORMS, window_period=1)
LAYER_NORMS = Structure(norm="layer_norm")
OLMO = Structure(norm="layer_norm", norm_bias=False, norm_weights=False)
INTERLEAVED = Structure(interleaved_rope=True)
POST_NORMS = Structure(post_norms=True)
GLM4 = replace(POST_NORMS, interleaved_rope=True)
GEMMA = Structure(scaled_embedding=True)
GEMMA2 = Structure(post_norms=True, scaled_embedding=True, window_period=2)
GEMMA3 = replace(GEMMA2, qk_norm="head", window_period=6)
GEMMA4 = replace(GEMMA3, v_norm=True, layer_scales=True)
VAULT_GEMMA = replace(GEMMA2, post_norms=False)
# Also OLMo 3.
OLMO2 = Structure(pre_norms=False, post_norms=True, qk_norm="all", window_period=4, only_full_scaled=True)
OLMO_HYBRID = Structure(pre_norms=False, post_norms=True, state_pre_norms=True, qk_norm="all", linear_period=4)
EXAONE4 = replace(OLMO2, qk_norm="head", only_full_scaled=False, only_windows_rotate=True)
AFMOE = Structure(
    post_norms=True, qk_norm="head", output_gate=True, separate_gate=True, window_period=4, only_windows_rotate=True
)
EXAONE_MOE = Structure(qk_norm="head", window_period=4, only_windows_rotate=True)
KOLIBRI = Structure(post_norms=True, qk_norm="head", window_period=5, only_windows_rotate=True)
GRANITE_HYBRID = Structure(mamba2=True)
NEMOTRON_H = Structure(mamba2=True)
FALCON_H1 = Structure(mamba2=True)
LFM2 = Structure(qk_norm="head", short_convs=True)
LFM3 = replace(LFM2, post_norms=True, output_gate=True, separate_gate=True, head_gate=True)
QWEN3_NEXT = Structure(qk_norm="head", output_gate=True, linear_period=4)
# Attention and MLP read the same norm.
COHERE = Structure(
    norm="layer_norm",
    norm_bias=False,
    parallel=True,
    interleaved_rope=True,
    window_period=4,
    only_windows_rotate=True,
)
PHI = Structure(norm="layer_norm", parallel=True, lm_head_bias=True)
# Attention and MLP have a norm each.
GPT_NEOX = Structure(norm="layer_norm", parallel=True)
NANOCHAT = Structure(norm_weights=False, qk_norm="unit", reversed_rope=True, normed_embedding=True)
GPT_OSS = Structure(attention_sinks=True, alternating_gate_up=True, window_period=2)
GRANITE_SWA = Structure(attention_sinks=True)
MIMO = Structure(attention_sinks=True)
STEP = Structure(qk_norm="head", output_gate=True, separate_gate=True, head_gate=True)
LAGUNA = replace(STEP, softplus_gate=True)
MUSE_GLIMMER = Structure(post_norms=True, qk_norm="unit", output_gate=True, separate_gate=True, normed_embedding=True)
LLAMA4 = Structure(interleaved_rope=True)
LATENT = Structure(latent_attention=True, interleaved_rope=True)
MINICPM3 = Structure(latent_attention=True)
AXK1 = replace(LATENT, experts_post_norm=True)
BAILING_HYBRID = replace(LATENT, linear_period=6, output_gate=True, separate_gate=True, head_gate=True)
KIMI_LINEAR = Structure(latent_attention=True, linear_period=4)
