"""The head before training: the model's last layer, with features that begin as one of the model's hidden states."""

import torch
from torch import Tensor

from fastinfer.errors import UnsupportedModelError
from fastinfer.models.checkpoint import Checkpoint
from fastinfer.train_head.head import HeadSizes

# Scale of random weights, for inputs that the model's layer does not have; 1 for that of usual initial weights.
SMALL = 0.5


def head_sizes(checkpoint: Checkpoint, num_aux: int, draft_vocab_size: int) -> HeadSizes:
    """Return the sizes of a head for a model.

    Raises:
        UnsupportedModelError: the model's last layer is not that of a Llama.
    """
    config = checkpoint.config
    last = config.num_layers - 1
    plain = not (
        config.has_state(last)
        or config.latent_attention
        or config.has_experts(last)
        or config.qkv_bias
        or config.qk_norm != "none"
        or config.post_norms
        or config.norm != "rms_norm"
        or config.output_gate
        or not config.gated
        or config.rotary_dim != config.head_dim
        or config.activation != "silu"
    )
    if not plain or config.kv_shapes:
        raise UnsupportedModelError(
            f"{checkpoint.path}: a head is trained for models with the layers of a Llama, got {config.architecture}"
        )
    return HeadSizes(
        config.hidden_size,
        config.mlp_size(last),
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        num_aux,
        draft_vocab_size,
        config.norm_eps,
        config.rope_theta,
    )


def initial_weights(checkpoint: Checkpoint, sizes: HeadSizes, draft_tokens: Tensor) -> dict[str, Tensor]:
    """Return the tensors of a head by the names of the files, fp32.

    Args:
        checkpoint: the model's.
        sizes: sizes of the head.
        draft_tokens: [draft_vocab] int64, the tokens that it can draft.
    """
    config, hidden = checkpoint.config, sizes.hidden_size
    layer = f"layers.{config.num_layers - 1}"
    q_size, kv_size = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    generator = torch.Generator().manual_seed(0)

    def stored(name: str, rows: int, columns: int) -> Tensor:
        return checkpoint.linear(name, rows, columns).dequantize().clone()

    def random(rows: int, columns: int) -> Tensor:
        values: Tensor = torch.randn(rows, columns, generator=generator) * (SMALL * columns**-0.5)
        return values

    head_name = "lm_head" if "lm_head" in checkpoint else "embedding"
    output = torch.cat([part.dequantize() for part in checkpoint.parts(head_name, config.vocab_size, hidden)])
    others = random(hidden, (sizes.num_aux - 1) * hidden)
    weights = {
        "fc": torch.cat([others, torch.eye(hidden)], -1),
        "layers.0.input_layernorm": torch.ones(hidden),
        "layers.0.hidden_norm": checkpoint.vector(f"{layer}.attention_norm", hidden),
        "layers.0.post_attention_layernorm": checkpoint.vector(f"{layer}.mlp_norm", hidden),
        "layers.0.self_attn.o_proj": stored(f"{layer}.o_proj", hidden, q_size),
        "layers.0.mlp.gate_proj": stored(f"{layer}.gate_proj", sizes.intermediate_size, hidden),
        "layers.0.mlp.up_proj": stored(f"{layer}.up_proj", sizes.intermediate_size, hidden),
        "layers.0.mlp.down_proj": stored(f"{layer}.down_proj", hidden, sizes.intermediate_size),
        "norm": checkpoint.vector("norm", hidden),
        "lm_head": output[draft_tokens],
    }
    for name, rows in {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}.items():
        values = stored(f"{layer}.{name}", rows, hidden)
        if config.interleaved_rope and name != "v_proj":
            values = values.unflatten(0, (-1, sizes.head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)
        weights[f"layers.0.self_attn.{name}"] = torch.cat([random(rows, hidden), values], -1)
    return {f"{name}.weight": values.contiguous() for name, values in weights.items()}
