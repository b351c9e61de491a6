"""Model configuration from the metadata of a GGUF file.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from fastinfer import ops
from fastinfer.errors import GGUFFormatError, UnsupportedModelError
from fastinfer.formats.gguf import GGUFFile
from fastinfer.models.config import MAX_SIZE, ModelConfig

ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3moe", "gemma2", "gemma3", "phi3", "gpt2")

# Every n-th layer has full attention, the others have a window. The files do not contain this number.
WINDOW_PERIODS = {"gemma2": 2, "gemma3": 6}
# Base in the layers with a window, which Gemma 3 keeps from its predecessors.
LOCAL_ROPE_THETAS = {"gemma3": 10000.0}


def read_gguf_config(file: GGUFFile) -> ModelConfig:
    """Read the model configuration from the metadata.

    Raises:
        UnsupportedModelError: the architecture or its rotary scaling is not implemented.
        GGUFFormatError: a key is missing, or its value is out of range.
    """
    architecture = file.get("general.architecture", str)
    if architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{file.path}: architecture {architecture!r} is not implemented; supported are {', '.join(ARCHITECTURES)}"
        )

    def size(key: str, default: int | None = None) -> int:
        name = f"{architecture}.{key}"
        if default is None:
            return file.get(name, int, minimum=1, maximum=MAX_SIZE)
        return file.get(name, int, default, minimum=1, maximum=MAX_SIZE)

    def number(key: str, default: float, minimum: float = 0.0) -> float:
        return file.get(f"{architecture}.{key}", float, default, minimum=minimum)

    hidden_size, num_heads = size("embedding_length"), size("attention.head_count")
    num_layers = size("block_count")
    num_kv_heads = size("attention.head_count_kv", num_heads)
    head_dim = size("attention.key_length", max(1, hidden_size // num_heads))
    if num_heads % num_kv_heads:
        raise GGUFFormatError(f"{file.path}: expected a multiple of {num_kv_heads} query heads, got {num_heads}")
    is_gpt2, is_gemma = architecture == "gpt2", architecture.startswith("gemma")
    rotary_dim = 0 if is_gpt2 else size("rope.dimension_count", head_dim)
    if rotary_dim % 2 or rotary_dim > head_dim:
        raise GGUFFormatError(f"{file.path}: rotary size must be even and at most {head_dim}, got {rotary_dim}")
    epsilon = "layer_norm_epsilon" if is_gpt2 else "layer_norm_rms_epsilon"
    num_experts = size("expert_count", 0)
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        intermediate_size=size("expert_feed_forward_length", 0) or size("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        vocab_size=_vocab_size(file),
        max_position=size("context_length"),
        norm_eps=file.get(f"{architecture}.attention.{epsilon}", float, minimum=0.0, maximum=1.0),
        rope_theta=number("rope.freq_base", 10000.0, minimum=1.001),
        rope_scaling=_rope_scaling(file, architecture, size("context_length"), rotary_dim // 2),
        local_rope_theta=LOCAL_ROPE_THETAS.get(architecture),
        windows=_windows(size("attention.sliding_window", 0), num_layers, WINDOW_PERIODS.get(architecture)),
        activation="gelu_tanh" if is_gemma or is_gpt2 else "silu",
        gated=not is_gpt2,
        norm="layer_norm" if is_gpt2 else "rms_norm",
        post_norms=is_gemma,
        qk_norm=architecture in ("qwen3", "qwen3moe", "gemma3"),
        qkv_bias=is_gpt2 or architecture == "qwen2",
        output_bias=is_gpt2,
        mlp_bias=is_gpt2,
        embedding_scale=hidden_size**0.5 if is_gemma else 1.0,
        attention_scale=_attention_scale(architecture, hidden_size, num_layers, num_heads),
        attention_softcap=number("attn_logit_softcapping", 0.0),
        logits_softcap=number("final_logit_softcapping", 0.0),
        num_experts=num_experts,
        experts_per_token=file.get(f"{architecture}.expert_used_count", int, minimum=1, maximum=num_experts)
        if num_experts
        else 0,
        renormalize_experts=True,
    )


def _vocab_size(file: GGUFFile) -> int:
    tensor = file.tensors.get("token_embd.weight")
    if tensor is None:
        raise GGUFFormatError(f"{file.path}: tensor 'token_embd.weight' is missing")
    return tensor.shape[0]


def _windows(window: int, num_layers: int, period: int | None) -> tuple[int, ...]:
    if not window:
        return ()
    return tuple(0 if period and (layer + 1) % period == 0 else window for layer in range(num_layers))


def _attention_scale(architecture: str, hidden_size: int, num_layers: int, num_heads: int) -> float | None:
    """Return the attention scale of Gemma 2 and 3 with 27 billion parameters; None for the default."""
    wide = (architecture, num_layers) in (("gemma2", 46), ("gemma3", 62))
    return (hidden_size / num_heads) ** -0.5 if wide else None


def _rope_scaling(file: GGUFFile, architecture: str, context_length: int, num_factors: int) -> ops.RopeScaling:
    prefix = f"{architecture}.rope.scaling"
    kind = file.get(f"{prefix}.type", str, "none")
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise UnsupportedModelError(
            f"{file.path}: rotary scaling {kind!r} is not implemented; supported are none, linear, longrope, yarn"
        )
    if "rope_factors_long.weight" in file.tensors:
        kind = "longrope"
    if kind == "longrope":
        return _longrope(file, prefix, context_length, num_factors)
    length = f"{prefix}.original_context_length"
    trained = file.get(length, int, minimum=1, maximum=MAX_SIZE) if kind == "yarn" else 0
    factor = file.get(f"{prefix}.factor", float, 1.0, minimum=1e-3)
    return ops.RopeScaling(kind=kind, factor=factor, original_max_position=trained)


def _longrope(file: GGUFFile, prefix: str, context_length: int, num_factors: int) -> ops.RopeScaling:
    trained = file.get(f"{prefix}.original_context_length", int, minimum=2, maximum=MAX_SIZE)
    factors = []
    for name in ("rope_factors_short.weight", "rope_factors_long.weight"):
        tensor = file.tensors.get(name)
        if tensor is None or tensor.shape != (num_factors,) or tensor.type.name != "F32":
            got = "none" if tensor is None else f"{list(tensor.shape)} {tensor.type.name}"
            raise GGUFFormatError(f"{file.path}: tensor {name!r} must be {num_factors} F32 numbers, got {got}")
        factors.append(tuple(float(value) for value in tensor.data.reshape(-1).view("<f4")))
    return ops.RopeScaling(
        kind="longrope",
        factor=context_length / trained,
        original_max_position=trained,
        attention_factor=file.get(f"{prefix}.attn_factor", float, None, minimum=0.0),
        short_factors=factors[0],
        long_factors=factors[1],
    )
