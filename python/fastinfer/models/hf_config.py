"""Model configuration from ``config.json``, as Hugging Face's transformers writes it (before and since version 5)."""

from pathlib import Path

from fastinfer import ops
from fastinfer.errors import CheckpointFormatError, UnsupportedModelError
from fastinfer.formats.json_fields import JsonFields
from fastinfer.models.config import MAX_SIZE, ModelConfig
from fastinfer.models.families import FAMILIES, Family

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
}


def family_of(fields: JsonFields) -> tuple[str, Family]:
    """Find the name and the family of the architecture.

    Raises:
        UnsupportedModelError: the architecture is not implemented.
    """
    names = fields.get("architectures", list, [])
    name = str(names[0]) if names else f"model_type {fields.get('model_type', str, 'none')!r}"
    if name not in FAMILIES:
        raise UnsupportedModelError(
            f"{fields.path}: architecture {name} is not implemented; supported are {', '.join(FAMILIES)}"
        )
    return name, FAMILIES[name]


def read_hf_config(path: Path) -> ModelConfig:
    """Read the model configuration from ``config.json``.

    Raises:
        UnsupportedModelError: the architecture or one of its settings is not implemented.
        CheckpointFormatError: a value is missing or out of range.
    """
    fields = JsonFields.read(path, CheckpointFormatError)
    name, family = family_of(fields)
    if name == "GPT2LMHeadModel":
        return _gpt2_config(fields)
    size = _Sizes(fields)
    hidden_size, num_heads, num_layers = (
        size("hidden_size"),
        size("num_attention_heads"),
        size("num_hidden_layers"),
    )
    num_kv_heads = size("num_key_value_heads", num_heads)
    head_dim = size("head_dim", max(1, hidden_size // num_heads))
    if num_heads % num_kv_heads:
        raise CheckpointFormatError(f"{path}: expected a multiple of {num_kv_heads} query heads, got {num_heads}")
    rope = _Rope(fields, head_dim)
    experts = size("num_local_experts", 0) or size("num_experts", 0)
    if experts:
        _require(fields, "decoder_sparse_step", 1)
        _require(fields, "mlp_only_layers", [])
    windows = _windows(fields, name, num_layers)
    attention_bias = fields.get("attention_bias", bool, False)
    scalar = fields.get("query_pre_attn_scalar", float, None, minimum=1e-3)
    return ModelConfig(
        architecture=name,
        hidden_size=hidden_size,
        intermediate_size=size("moe_intermediate_size", 0) or size("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rotary_dim=rope.dim,
        vocab_size=size("vocab_size"),
        draft_vocab_size=_draft_vocab_size(fields, size),
        max_position=size("max_position_embeddings"),
        norm_eps=fields.get("rms_norm_eps", float, 1e-6, minimum=0.0, maximum=1.0),
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        local_rope_theta=rope.local_theta,
        windows=windows,
        activation=_activation(fields, "hidden_activation" if "hidden_activation" in fields.values else "hidden_act"),
        post_norms=family.post_norms,
        qk_norm=family.qk_norm,
        qkv_bias=family.qkv_bias or attention_bias,
        output_bias=attention_bias,
        mlp_bias=fields.get("mlp_bias", bool, False),
        embedding_scale=hidden_size**0.5 if family.scaled_embedding else 1.0,
        attention_scale=None if scalar is None else scalar**-0.5,
        attention_softcap=fields.get("attn_logit_softcapping", float, 0.0, minimum=0.0),
        logits_softcap=fields.get("final_logit_softcapping", float, 0.0, minimum=0.0),
        num_experts=experts,
        experts_per_token=fields.get("num_experts_per_tok", int, minimum=1, maximum=experts) if experts else 0,
        renormalize_experts=fields.get("norm_topk_prob", bool, name == "MixtralForCausalLM"),
    )


class _Sizes:
    """Reader of sizes, integers from 1 to ``MAX_SIZE``; a default of 0 is allowed, too."""

    def __init__(self, fields: JsonFields) -> None:
        self._fields = fields

    def __call__(self, key: str, default: int | None = None) -> int:
        if default is None:
            return self._fields.get(key, int, minimum=1, maximum=MAX_SIZE)
        return self._fields.get(key, int, default, minimum=1, maximum=MAX_SIZE)


class _Rope:
    """Rotary settings, for all layers or separately for those with and without a window."""

    def __init__(self, fields: JsonFields, head_dim: int) -> None:
        parameters = fields.object("rope_parameters")
        local = parameters.object("sliding_attention") if parameters else None
        if parameters and local:
            parameters = parameters.object("full_attention") or parameters
        scaling = parameters or fields.object("rope_scaling")
        theta = fields.get("rope_theta", float, 10000.0, minimum=1.001)
        self.theta = parameters.get("rope_theta", float, theta, minimum=1.001) if parameters else theta
        self.local_theta = fields.get("rope_local_base_freq", float, None, minimum=1.001)
        if local:
            self.local_theta = local.get("rope_theta", float, minimum=1.001)
        share = fields.get("partial_rotary_factor", float, 1.0, minimum=0.0, maximum=1.0)
        if parameters:
            share = parameters.get("partial_rotary_factor", float, share, minimum=0.0, maximum=1.0)
        self.dim = int(head_dim * share)
        if self.dim % 2 or not self.dim:
            raise CheckpointFormatError(f"{fields.path}: the rotated size must be even and positive, got {self.dim}")
        self.scaling = ops.RopeScaling() if scaling is None else self._scaling(fields, scaling)

    def _scaling(self, fields: JsonFields, scaling: JsonFields) -> ops.RopeScaling:
        kind = scaling.get("rope_type", str, None) or scaling.get("type", str, "default")
        if kind in ("default", "none"):
            return ops.RopeScaling()
        positions = fields.get("max_position_embeddings", int, minimum=1, maximum=MAX_SIZE)
        trained = fields.get("original_max_position_embeddings", int, positions, minimum=1, maximum=MAX_SIZE)
        trained = scaling.get("original_max_position_embeddings", int, trained, minimum=1, maximum=MAX_SIZE)
        attention_factor = scaling.get("attention_factor", float, None, minimum=0.0)
        if kind in ("longrope", "su"):
            half = self.dim // 2
            if trained < 2:  # its logarithm is a divisor
                raise CheckpointFormatError(
                    f"{fields.path}: original_max_position_embeddings: expected at least 2, got {trained}"
                )
            return ops.RopeScaling(
                kind="longrope",
                factor=positions / trained,
                original_max_position=trained,
                attention_factor=attention_factor,
                short_factors=scaling.numbers("short_factor", half),
                long_factors=scaling.numbers("long_factor", half),
            )
        if kind not in ("linear", "llama3", "yarn"):
            raise UnsupportedModelError(
                f"{fields.path}: rotary scaling {kind!r} is not implemented; "
                "supported are linear, llama3, longrope, yarn"
            )
        for key in ("mscale", "mscale_all_dim") if kind == "yarn" else ():
            _require(scaling, key, None)
        return ops.RopeScaling(
            kind=kind,
            factor=scaling.get("factor", float, minimum=1e-3),
            original_max_position=0 if kind == "linear" else trained,
            low_freq_factor=scaling.get("low_freq_factor", float, 1.0, minimum=1e-3),
            high_freq_factor=scaling.get("high_freq_factor", float, 4.0, minimum=1e-3),
            beta_fast=scaling.get("beta_fast", float, 32.0, minimum=1e-3),
            beta_slow=scaling.get("beta_slow", float, 1.0, minimum=1e-3),
            attention_factor=attention_factor,
        )


def _draft_vocab_size(fields: JsonFields, size: _Sizes) -> int:
    """Return the number of tokens that a draft model can draft, 0 for all."""
    every, drafted = size("vocab_size"), size("draft_vocab_size", 0)
    if drafted > every:
        raise CheckpointFormatError(f"{fields.path}: draft_vocab_size: expected at most {every}, got {drafted}")
    return drafted


def _windows(fields: JsonFields, name: str, num_layers: int) -> tuple[int, ...]:
    """Return the length of each layer's attention window in positions, 0 for none."""
    window = fields.get("sliding_window", int, 0, minimum=1, maximum=MAX_SIZE)
    if not window or not fields.get("use_sliding_window", bool, True):
        return ()
    if kinds := fields.get("layer_types", list, []):
        if len(kinds) != num_layers or not {str(k) for k in kinds} <= {"sliding_attention", "full_attention"}:
            raise CheckpointFormatError(
                f"{fields.path}: layer_types: expected {num_layers} of sliding_attention and full_attention, "
                f"got {kinds!r:.80}"
            )
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    # Older files have no layer_types; this is the rule in the families' own code.
    period = {"Gemma2ForCausalLM": 2, "Gemma3ForCausalLM": 6}.get(name)
    period = fields.get("sliding_window_pattern", int, period, minimum=1)
    if period:
        return tuple(0 if (layer + 1) % period == 0 else window for layer in range(num_layers))
    first = 0
    if name.startswith("Qwen"):
        first = fields.get("max_window_layers", int, num_layers, minimum=0)
    return tuple(window if layer >= first else 0 for layer in range(num_layers))


def _activation(fields: JsonFields, key: str) -> str:
    name = fields.get(key, str, "silu")
    if name not in ACTIVATIONS:
        raise UnsupportedModelError(
            f"{fields.path}: {key} {name!r} is not implemented; supported are {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def _require(fields: JsonFields, key: str, expected: object) -> None:
    value = fields.values.get(key)
    if value is not None and value != expected:
        raise UnsupportedModelError(f"{fields.path}: {key} must be {expected!r}, got {value!r:.80}")


def _gpt2_config(fields: JsonFields) -> ModelConfig:
    size = _Sizes(fields)
    _require(fields, "scale_attn_weights", True)
    _require(fields, "scale_attn_by_inverse_layer_idx", False)
    _require(fields, "add_cross_attention", False)
    hidden_size, num_heads = size("n_embd"), size("n_head")
    if hidden_size % num_heads:
        raise CheckpointFormatError(f"{fields.path}: n_embd: expected a multiple of {num_heads}, got {hidden_size}")
    return ModelConfig(
        architecture="GPT2LMHeadModel",
        hidden_size=hidden_size,
        intermediate_size=size("n_inner", 4 * hidden_size),
        num_layers=size("n_layer"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        rotary_dim=0,
        vocab_size=size("vocab_size"),
        max_position=size("n_positions"),
        norm_eps=fields.get("layer_norm_epsilon", float, 1e-5, minimum=0.0, maximum=1.0),
        activation=_activation(fields, "activation_function"),
        gated=False,
        norm="layer_norm",
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
    )
