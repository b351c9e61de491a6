"""A decoder layer's norms and residuals within its products: six kernel calls and the cache's update."""

from typing import Any

from torch import Tensor, nn

from fastinfer.nn.attention import Attention, check_computable
from fastinfer.nn.mlp import FusedMLP
from fastinfer.nn.rms_norm import RMSNorm

# What a layer has that is computed so, and nothing else.
CHILDREN: dict[str, type[nn.Module]] = {
    "self_attn": Attention,
    "mlp": FusedMLP,
    "input_layernorm": RMSNorm,
    "post_attention_layernorm": RMSNorm,
}


def is_fusible(layer: nn.Module) -> bool:
    """Whether a layer has these modules and no others, and its own ``forward`` still."""
    children = dict(layer.named_children())
    if children.keys() != CHILDREN.keys() or "forward" in vars(layer):
        return False
    if any(child._forward_hooks or child._forward_pre_hooks for child in children.values()):
        return False  # which would not be called
    return all(isinstance(children[name], kind) for name, kind in CHILDREN.items())


def fused_forward(
    layer: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    past_key_values: Any = None,
    is_causal: bool | None = None,
    output_attentions: bool = False,
    **_: Any,
) -> Tensor:
    """``x += self_attn(input_layernorm(x)); x += mlp(post_attention_layernorm(x))``, Llama's layer.

    The layer stays what it was, with this as its ``forward``: so transformers still finds its class, whose results it
    collects for ``output_hidden_states``. The modules in it are not called, but what they consist of.

    Args:
        layer: with the modules of ``CHILDREN``.
        hidden_states: [batch, length, hidden]; not changed.
        attention_mask, position_embeddings, past_key_values, is_causal, output_attentions: as in
            :class:`fastinfer.nn.Attention`.

    Returns:
        [batch, length, hidden].
    """
    check_computable(is_causal, output_attentions)
    batch, length, hidden = hidden_states.shape
    rows = hidden_states.reshape(batch * length, hidden)
    options = layer.input_layernorm.as_options()
    rows = layer.self_attn.attend(
        rows, batch, position_embeddings, attention_mask, past_key_values, residual=rows, **options
    )
    rows = layer.mlp.transform(rows, residual=rows, **layer.post_attention_layernorm.as_options())
    return rows.view(batch, length, hidden)
