"""Perplexity: the exponential of the mean negative log-probability of each token given those before it."""

import math
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from fastinfer import ops
from fastinfer.evaluation.text_file import Sections
from fastinfer.models import Model, check_has_all_logits
from fastinfer.models.batch import Batch
from fastinfer.models.kv_cache import KVCache, num_blocks_for

BLOCK_SIZE = 32
# Positions whose logits are in memory at once; in fp32 those of 512 would be 0.5 GB with Gemma's vocabulary.
ROWS = 64


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
    for text, parts in zip(texts, _parts(model, texts, slice(None), kv_cache_dtype, device, batch_size), strict=True):
        found = torch.empty(len(text), model.config.vocab_size, device=device)
        for start, part in zip(range(0, len(text), ROWS), parts, strict=True):
            found[start : start + ROWS] = part
        yield found


def predictions(
    model: Model, sections: Sections, kv_cache_dtype: torch.dtype, *, device: str = "cpu", batch_size: int = 1
) -> Iterator[Iterator[tuple[Tensor, Tensor]]]:
    """Yield, for each section, pairs of tokens that follow each other, and what the model predicts for them.

    A pair has [n] int64, the tokens, and [n, vocab] fp32, the log-probabilities in their places. ``n`` is at most
    ``ROWS``, so that the logits of a whole section are never in memory. Each section's pairs must be taken before the
    next section.

    Args:
        model, kv_cache_dtype, device, batch_size: see :func:`log_probabilities`.
        sections: the sections; tokens that are given are not predicted.
    """
    found = _parts(model, sections.ids, slice(sections.given - 1, -1), kv_cache_dtype, device, batch_size)
    for ids, parts in zip(sections.ids, found, strict=True):
        yield zip(torch.tensor(ids[sections.given :], device=device).split(ROWS), parts, strict=True)


@torch.inference_mode()
def _parts(
    model: Model, texts: list[list[int]], wanted: slice, kv_cache_dtype: torch.dtype, device: str, batch_size: int
) -> Iterator[Iterator[Tensor]]:
    """Yield, for each text, the log-probabilities of the token after each wanted position, in parts."""
    check_has_all_logits(model)
    blocks = batch_size * max(num_blocks_for(len(text), BLOCK_SIZE) for text in texts)
    cache = KVCache.of_model(model.config, [blocks], BLOCK_SIZE, kv_cache_dtype, device, state_dtype=model.dtype)
    for start in range(0, len(texts), batch_size):
        together = texts[start : start + batch_size]
        with ops.prompt_rows(0):
            hidden = model.forward(_on(device, Batch.of_texts(together, BLOCK_SIZE)), cache)
        first = 0
        for text in together:
            yield _log_softmax(model, hidden, torch.arange(first, first + len(text), device=device)[wanted])
            first += len(text)


@torch.inference_mode()
def _log_softmax(model: Model, hidden: Tensor, rows: Tensor) -> Iterator[Tensor]:
    for part in rows.split(ROWS):
        yield model.logits(hidden, part).float().log_softmax(-1)


def _on(device: str, batch: Batch) -> Batch:
    def moved(value: Tensor | tuple[Tensor, ...]) -> Any:
        return tuple(map(moved, value)) if isinstance(value, tuple) else value.to(device)

    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return Batch(**{name: moved(value) for name, value in values.items() if value is not None})


def loss(log_probs: Tensor, tokens: Tensor) -> float:
    """Return the sum of the negative log-probabilities of tokens [n], in nats, from those of all tokens [n, vocab]."""
    return -float(log_probs.gather(1, tokens[:, None]).double().sum())


def exponential(loss: float) -> float:
    """Return the perplexity for a mean loss in nats, infinity if it is beyond the range of a float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def perplexity(
    model: Model,
    sections: Sections,
    kv_cache_dtype: torch.dtype = torch.float32,
    *,
    device: str = "cpu",
    batch_size: int = 1,
    progress: Callable[[int], object] = lambda count: None,
) -> float:
    """Compute the perplexity over sections of a text, each predicted from its own beginning.

    Args:
        model, sections, kv_cache_dtype, device, batch_size: see :func:`predictions`.
        progress: function that is called with the number of sections that are done since the last call.
    """
    losses, count = 0.0, 0
    for pairs in predictions(model, sections, kv_cache_dtype, device=device, batch_size=batch_size):
        for tokens, log_probs in pairs:
            losses += loss(log_probs, tokens)
            count += len(tokens)
        progress(1)
    return exponential(losses / count)
