"""Perplexity: the exponential of the mean negative log-probability of each token given those before it."""

import math
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from fastinfer import ops
from fastinfer.errors import RequestError
from fastinfer.models import Model, check_has_all_logits
from fastinfer.models.batch import Batch
from fastinfer.models.kv_cache import KVCache, num_blocks_for

BLOCK_SIZE = 32


def split_sections(ids: list[int], length: int, max_tokens: int | None = None) -> list[list[int]]:
    """Cut a text into sections of equal length, which are evaluated independently.

    Args:
        ids: token ids of the text.
        length: tokens of a section; a shorter rest at the end is left out.
        max_tokens: largest number of tokens to use; ``None`` for all.

    Raises:
        RequestError: the text is shorter than one section.
    """
    ids = ids[:max_tokens]
    found = [ids[start : start + length] for start in range(0, len(ids) - length + 1, length)]
    if not found:
        raise RequestError(f"the text must have at least {length} tokens, got {len(ids)}")
    return found


@torch.inference_mode()
def log_probabilities(
    model: Model, texts: list[list[int]], kv_cache_dtype: torch.dtype, *, device: str = "cpu", batch_size: int = 1
) -> Iterator[Tensor]:
    """Yield [tokens, vocab] fp32 for each text: the log-probabilities of the token after each position.

    The tokens are computed as those of a prompt, see :func:`fastinfer.ops.prompt_rows`.

    Args:
        model: a model on ``device``.
        texts: token ids of each text.
        kv_cache_dtype: dtype of the cached keys and values.
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:N"`` (not yet run on a GPU).
        batch_size: number of texts that are computed at once. On a CPU it changes no bit of the result.
    """
    check_has_all_logits(model)
    blocks = batch_size * max(num_blocks_for(len(text), BLOCK_SIZE) for text in texts)
    cache = KVCache.of_model(model.config, [blocks], BLOCK_SIZE, kv_cache_dtype, device, state_dtype=model.dtype)
    for start in range(0, len(texts), batch_size):
        together = texts[start : start + batch_size]
        with ops.prompt_rows(0):
            hidden = model.forward(_on(device, Batch.of_texts(together, BLOCK_SIZE)), cache)
        first = 0
        for text in together:  # the logits of one text alone take hundreds of megabytes
            rows = torch.arange(first, first + len(text), device=device)
            yield model.logits(hidden, rows).float().log_softmax(-1)
            first += len(text)


def _on(device: str, batch: Batch) -> Batch:
    def moved(value: Tensor | tuple[Tensor, ...]) -> Any:
        return tuple(map(moved, value)) if isinstance(value, tuple) else value.to(device)

    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return Batch(**{name: moved(value) for name, value in values.items() if value is not None})


def loss(log_probs: Tensor, text: list[int]) -> float:
    """Return the mean negative log-probability of all tokens except the first, in nats."""
    following = torch.tensor(text[1:], device=log_probs.device)
    return -float(log_probs[:-1].gather(1, following[:, None]).mean())


def perplexity(
    model: Model,
    texts: list[list[int]],
    kv_cache_dtype: torch.dtype = torch.float32,
    *,
    device: str = "cpu",
    batch_size: int = 1,
    progress: Callable[[int], object] = lambda count: None,
) -> float:
    """Compute the perplexity over texts of equal length, each predicted from its own beginning.

    Args:
        model, texts, kv_cache_dtype, device, batch_size: see :func:`log_probabilities`.
        progress: function that is called with the number of texts that are done since the last call.
    """
    losses = []
    found = log_probabilities(model, texts, kv_cache_dtype, device=device, batch_size=batch_size)
    for log_probs, text in zip(found, texts, strict=True):
        losses.append(loss(log_probs, text))
        progress(1)
    return math.exp(sum(losses) / len(losses))
