"""Mask function of ``attn_implementation="fastinfer"``: first position and end of each sequence instead of a matrix."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function, prepare_padding_mask


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: Any = "cpu",
    **_: Any,
) -> Tensor | None:
    """Make the mask; transformers calls this once per forward pass and kind of layer.

    Args:
        batch_size, q_length, kv_length: sizes of the batch, the queries and the cache.
        q_offset, kv_offset: positions of the first query and of the first entry of the cache.
        mask_function: predicate over index tensors (batch, head, query, key), true where a query sees a key.
        attention_mask: [batch, positions] bool, False for padding.
        local_size: size of a sliding window.
        use_vmap: whether the model adds a pattern of its own.
        device: device of the result.

    Returns:
        ``None``, or the argument ``visible`` of :func:`fastinfer.nn.dense_cache.dense_cache_attention`. It has four
        dimensions, so that transformers passes it on unchanged.

    Raises:
        ValueError: the pattern is not causal with at most a sliding window and padding around each sequence; chunks,
            packed sequences and bidirectional prefixes are not supported. This is not checked while compiling.
    """
    if use_vmap:
        raise _unsupported("a pattern of the model's own")
    compiling = torch.compiler.is_compiling()
    if not compiling and mask_function is not causal_mask_function:
        _check_pattern(mask_function, batch_size, q_length, kv_length, q_offset, kv_offset, local_size, device)
    end = q_offset + q_length - kv_offset
    padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is not None and not compiling and bool(padding[:, kv_offset : kv_offset + int(end)].all()):
        padding = None
    if padding is None:
        if not isinstance(end, Tensor) and end == kv_length:
            return None
        ends = torch.as_tensor(end, device=device).to(torch.int32)
        return ends.reshape(1, 1, 1, 1).expand(batch_size, 1, 1, 1)
    cached = padding[:, kv_offset : kv_offset + kv_length].int()
    first = cached.argmax(-1)
    if not compiling:
        _check_padding(cached[:, : int(end)])
    ends = torch.as_tensor(end, device=device).expand(batch_size)
    return torch.stack((first, ends), -1).to(torch.int32)[:, None, None]


def _check_padding(cached: Tensor) -> None:
    """Raise ValueError if a sequence has padding in its middle, which the kernel would not mask."""
    begins = cached.diff(dim=-1).eq(1).sum(-1) + cached[:, 0]
    if bool((begins > 1).any()):
        raise _unsupported("an attention_mask with zeros between ones")


def _check_pattern(
    mask_function: Callable[..., Tensor],
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor,
    kv_offset: int,
    local_size: int | None,
    device: Any,
) -> None:
    """Raise ValueError unless the pattern is causal with an optional sliding window.

    It is evaluated at both borders of each query's expected range, where any other pattern would differ.
    """
    batch = torch.arange(batch_size, device=device)[:, None, None]
    query = torch.arange(q_length, device=device)[:, None] + q_offset
    first = query - (local_size or kv_length + kv_offset) + 1
    key = torch.cat((first - 1, first, query, query + 1), -1).clamp(kv_offset, kv_offset + kv_length - 1)
    expected = (key >= first) & (key <= query)
    batch, query, key = torch.broadcast_tensors(batch, query, key)
    if not torch.equal(mask_function(batch, torch.zeros_like(batch), query, key), expected.expand_as(key)):
        raise _unsupported("another pattern (chunks, packed sequences, or not causal)")


def _unsupported(what: str) -> ValueError:
    return ValueError(
        "attn_implementation='fastinfer' expects causal masks, with padding around a sequence and sliding windows at "
        f"most; got {what}"
    )
