"""Model configuration of GPT-2, whose ``config.json`` has names of its own for everything."""

from fastinfer.errors import CheckpointFormatError
from fastinfer.formats.json_fields import JsonFields
from fastinfer.models.config import MAX_LAYERS, ModelConfig
from fastinfer.models.hf_fields import Sizes, activation, require


def gpt2_config(fields: JsonFields) -> ModelConfig:
    """Return the configuration, see :func:`fastinfer.models.hf_config.read_hf_config`."""
    size = Sizes(fields)
    require(fields, "scale_attn_weights", True)
    require(fields, "scale_attn_by_inverse_layer_idx", False)
    require(fields, "add_cross_attention", False)
    hidden_size, num_heads = size("n_embd"), size("n_head")
    if hidden_size % num_heads:
        raise CheckpointFormatError(f"{fields.path}: n_embd: expected a multiple of {num_heads}, got {hidden_size}")
    return ModelConfig(
        architecture="GPT2LMHeadModel",
        hidden_size=hidden_size,
        intermediate_size=size("n_inner", 4 * hidden_size),
        num_layers=fields.get("n_layer", int, minimum=1, maximum=MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        rotary_dim=0,
        vocab_size=size("vocab_size"),
        max_position=size("n_positions"),
        norm_eps=fields.get("layer_norm_epsilon", float, 1e-5, minimum=0.0, maximum=1.0),
        activation=activation(fields, "activation_function", gated=False),
        gated=False,
        norm="layer_norm",
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
    )
