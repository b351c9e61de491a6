"""Fused forward pass of a decoder layer: norms and residual sums are computed within the matrix products.

A layer takes six kernel calls and the update of the cache.
"""

from typing import Any

from torch import Tensor, nn

from fastinfer.nn.attention import Attention, check_computable
from fastinfer.nn.mlp import FusedMLP
from fastinfer.nn.rms_norm import RMSNorm

# The modules of a layer that can be fused; it must have no others.
CHILDREN: dict[str, type[nn.Module]] = {
    "self_attn": Attention,
    "mlp": FusedMLP,
    "input_layernorm": RMSNorm,
    "post_attention_layernorm": RMSNorm,
}


def is_fusible(layer: nn.Module) -> bool:
    """Return whether a layer has the modules of ``CHILDREN`` and no others, and still its own ``forward``."""
    children = dict(layer.named_children())
    if children.keys() != CHILDREN.keys() or "forward" in vars(layer):
        return False
    if any(child._forward_hooks or child._forward_pre_hooks for child in children.values()):
        return False  # the hooks would not be called
    return all(isinstance(children[name], kind) for name, kind in CHILDREN.items())


def fused_forward(
    layer: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    cache: Any = None,
    past_key_values: Any = None,
    is_causal: bool | None = None,
    output_attentions: bool = False,
    **_: Any,
) -> Tensor:
    """Compute Llama's layer: ``x += self_attn(input_layernorm(x)); x += mlp(post_attention_layernorm(x))``.

    It becomes the ``forward`` of an otherwise unchanged layer, because transformers collects ``output_hidden_states``
    from layers of the original class. The four modules themselves are not called, only their parts.

    Args:
        layer: a layer that has the modules of ``CHILDREN``.
        hidden_states: [batch, length, hidden]; not changed.
        attention_mask, position_embeddings, cache, past_key_values, is_causal, output_attentions: see
            :meth:`fastinfer.nn.Attention.forward`.

    Returns:
        [batch, length, hidden].
    """
    check_computable(is_causal, output_attentions)
    batch, length, hidden = hidden_states.shape
    rows: Tensor = hidden_states.reshape(batch * length, hidden)
    options = layer.input_layernorm.as_options()
    cache = past_key_values if cache is None else cache
    inputs = (batch, length), position_embeddings, attention_mask, cache
    rows = layer.self_attn.attend(rows, *inputs, residual=rows, **options)
    rows = layer.mlp.transform(rows, residual=rows, **layer.post_attention_layernorm.as_options())
    return rows.view(batch, length, hidden)
