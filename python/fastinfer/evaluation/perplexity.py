"""Perplexity: the exponential of the mean negative log-probability of each token given those before it."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from fastinfer.errors import RequestError
from fastinfer.models import Model
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
def log_probabilities(model: Model, texts: list[list[int]], kv_cache_dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield [tokens, vocab] fp32 for each text: the log-probabilities of the token after each position."""
    config = model.config
    blocks = max(num_blocks_for(len(text), BLOCK_SIZE) for text in texts)
    sizes = BLOCK_SIZE, config.num_kv_heads, config.head_dim, kv_cache_dtype, "cpu"
    cache = KVCache.empty(config.num_layers, blocks, *sizes)
    for text in texts:
        batch = Batch.of_texts([text], BLOCK_SIZE)
        yield model.logits(model.forward(batch, cache), batch.positions).float().log_softmax(-1)


def loss(log_probs: Tensor, text: list[int]) -> float:
    """Return the mean negative log-probability of all tokens except the first, in nats."""
    return -float(log_probs[:-1].gather(1, torch.tensor(text[1:])[:, None]).mean())


def perplexity(model: Model, texts: list[list[int]], kv_cache_dtype: torch.dtype = torch.float32) -> float:
    """Compute the perplexity over texts of equal length, each predicted from its own beginning."""
    losses = [
        loss(log_probs, text)
        for log_probs, text in zip(log_probabilities(model, texts, kv_cache_dtype), texts, strict=True)
    ]
    return math.exp(sum(losses) / len(losses))
