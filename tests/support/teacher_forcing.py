"""A model's log-probabilities of a given text."""

from dataclasses import replace

import torch
from torch import Tensor

from fastinfer import ops
from fastinfer.models.batch import Batch
from fastinfer.models.config import Precision
from fastinfer.models.decoder import Decoder
from fastinfer.models.kv_cache import KVCache, num_blocks_for

BLOCK_SIZE = 32


def log_probabilities(
    model: Decoder,
    ids: list[int],
    dtype: str,
    adapter: int | None = None,
    kv_cache_dtype: torch.dtype | None = None,
) -> Tensor:
    """In one prefill of a prompt: [tokens, vocab]; with the LoRA adapter in this slot."""
    blocks = num_blocks_for(len(ids), BLOCK_SIZE)
    kv_cache_dtype = kv_cache_dtype or Precision.of(dtype).kv_cache_dtype
    cache = KVCache.of_model(model.config, [blocks], BLOCK_SIZE, kv_cache_dtype, "cpu", state_dtype=model.dtype)
    batch = Batch.of_texts([ids], BLOCK_SIZE)
    if adapter is not None:
        batch = replace(batch, adapter_ids=torch.full((len(ids),), adapter, dtype=torch.int32))
    every = batch.positions
    with ops.prompt_rows(0):
        hidden = model.forward(batch, cache)
    return model.logits(hidden, every, batch.adapter_ids).float().log_softmax(-1)


def mean_loss(log_probs: Tensor, ids: list[int]) -> float:
    """The mean negative log-probability of each token but the first."""
    return -log_probs[:-1].gather(1, torch.tensor(ids[1:])[:, None]).mean().item()
