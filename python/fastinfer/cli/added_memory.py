"""Memory of what is used beside a model: drafts of another model or a draft head, and a distillation of the model."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fastinfer.cli.memory_bounds import Weights, dtype_name
from fastinfer.distill.recorder import record_bytes
from fastinfer.distill.settings import TOP_K
from fastinfer.distill.student import FROZEN_BYTES, HEAD_BYTES, TRAINED_BYTES
from fastinfer.engine.cache_sizes import cache_sizes
from fastinfer.engine.config import EngineConfig
from fastinfer.models import load_weights
from fastinfer.models.checkpoint import Checkpoint
from fastinfer.models.config import ModelConfig
from fastinfer.models.kv_cache import num_blocks_for
from fastinfer.models.offload import tensors_of
from fastinfer.utils.machine import has_bf16


@dataclass(frozen=True)
class DraftMemory:
    """Memory of a draft model or a draft head.

    Attributes:
        weights_bytes: size of the weights.
        kv_cache_bytes: size of its keys and values, and of the features of a head, by dtype of the cache.
    """

    weights_bytes: int
    kv_cache_bytes: dict[str, int]


def draft_memory(checkpoint: Checkpoint, dtypes: Sequence[torch.dtype], context: int, batch: int) -> DraftMemory:
    """Return the memory of a draft model or a draft head for ``batch`` sequences of ``context`` tokens.

    Raises:
        GGUFFormatError, CheckpointFormatError, UnsupportedModelError: it cannot be loaded.
    """
    config = checkpoint.config
    if config.is_draft_head:
        head = load_weights(checkpoint, "auto", "cpu", context)
        weights_bytes = sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors_of(head)}.values())
    else:
        weights_bytes = Weights.of(checkpoint, context).memory_bytes
    sizes = {dtype_name(dtype): _cache_bytes(config, dtype, context, batch) for dtype in dtypes}
    return DraftMemory(weights_bytes, sizes)


def distillation_memory(checkpoint: Checkpoint, weights: Weights) -> dict[str, int]:
    """Return the memory of training a student with some of a model's layers; empty if it cannot be a teacher.

    Args:
        checkpoint: the teacher's.
        weights: the same, loaded.

    Returns:
        ``layer_bytes``, mean size of a layer with its gradients and optimizer; ``vocabulary_bytes``, size of embedding
        and output layer; ``record_bytes``, size of a token's record with the default settings.
    """
    config = checkpoint.config
    if config.num_experts or config.num_storing_layers < config.num_layers:
        return {}
    # Each number of a matrix is multiplied and added once for a token. Norms are less than a thousandth.
    numbers = (weights.byte_operations + weights.float_operations) // 2
    head_bytes = HEAD_BYTES if has_bf16() else FROZEN_BYTES if "lm_head" in checkpoint else 0
    return {
        "layer_bytes": TRAINED_BYTES * numbers // config.num_layers,
        "vocabulary_bytes": (FROZEN_BYTES + head_bytes) * config.vocab_size * config.hidden_size,
        "record_bytes": record_bytes(TOP_K),
    }


def _cache_bytes(config: ModelConfig, dtype: torch.dtype, context: int, batch: int) -> int:
    settings = EngineConfig(kv_cache_dtype=dtype)
    slots = batch * num_blocks_for(context, settings.block_size) * settings.block_size
    return slots * sum(size.num_bytes for size in cache_sizes(settings, [config]))
