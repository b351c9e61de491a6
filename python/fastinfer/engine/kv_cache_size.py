"""The size of the KV cache, and the longest sequence that the engine accepts."""

import os
from dataclasses import dataclass

import torch

from fastinfer.engine.config import EngineConfig
from fastinfer.errors import RequestError
from fastinfer.models.kv_cache import num_blocks_for

# Share of a CPU's memory beside the weights that a cache of default size may use.
CPU_MEMORY_SHARE = 0.5
# Sequence length in tokens that the default size on a CPU provides for. Few requests use a long context to the end, and
# for those that do, preempting others costs less than the memory.
TYPICAL_TOKENS = 2048
OPTIONS = "max_model_len (--context), kv_cache_dtype (--kv-cache-dtype)"


@dataclass(frozen=True, slots=True)
class KVCacheSize:
    """Limits that follow from the memory.

    Attributes:
        num_blocks: number of blocks of the cache.
        max_model_len: longest sequence in tokens, which fits into the cache.
    """

    num_blocks: int
    max_model_len: int


def available_memory(device: str) -> int:
    """Return the number of bytes that can be allocated on the device without swapping."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as file:
            line = next(line for line in file if line.startswith("MemAvailable:"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def default_memory(config: EngineConfig, weight_bytes: int = 0) -> int:
    """Return the number of bytes that a cache of default size may use.

    On a CPU this is half of the available memory that the weights leave. On a GPU it is what ``gpu_memory_utilization``
    of the whole memory leaves, so that the rest is there for activations.

    Args:
        config: configuration of the engine.
        weight_bytes: size of the weights that are still to be loaded.
    """
    free = available_memory(config.device) - weight_bytes
    if torch.device(config.device).type == "cuda":
        total = torch.cuda.mem_get_info(config.device)[1]
        return max(0, free - int(total * (1 - config.gpu_memory_utilization)))
    return max(0, int(free * CPU_MEMORY_SHARE))


def choose_kv_cache_size(
    config: EngineConfig, model_limit: int, token_bytes: int, weight_bytes: int = 0
) -> KVCacheSize:
    """Choose the number of blocks and the longest sequence.

    Without ``max_model_len`` the longest sequence is the model's limit, or what fits into the cache if that is less.

    Args:
        config: configuration of the engine.
        model_limit: longest sequence of the model in tokens.
        token_bytes: bytes of one token's keys and values in all layers of all models.
        weight_bytes: size of the weights that are still to be loaded.

    Raises:
        RequestError: the cache does not fit into memory, or ``max_model_len`` does not fit into the cache or exceeds
            the model's limit.
    """
    if config.max_model_len is not None and config.max_model_len > model_limit:
        raise RequestError(f"max_model_len must be at most the model's {model_limit}, got {config.max_model_len}")
    block_bytes = config.block_size * token_bytes
    available = max(0, available_memory(config.device) - weight_bytes)
    wanted = config.max_model_len or model_limit
    if config.num_kv_blocks is not None:
        num_blocks = config.num_kv_blocks
    elif config.kv_cache_memory is not None:
        num_blocks = config.kv_cache_memory // block_bytes
    else:
        num_blocks = _default_num_blocks(config, wanted, default_memory(config, weight_bytes) // block_bytes)
    if num_blocks * block_bytes > available:
        raise RequestError(
            f"the KV cache must fit into the {available} bytes of memory that are available beside the weights, "
            f"got {num_blocks} blocks of {block_bytes} bytes"
        )
    needed = num_blocks_for(config.max_model_len or 1, config.block_size)
    if num_blocks < needed:
        subject = "one block" if config.max_model_len is None else f"max_model_len={config.max_model_len}"
        raise RequestError(
            f"{subject} needs a KV cache of {needed * block_bytes} bytes, got {num_blocks * block_bytes}: "
            f"change {options_for(config)}"
        )
    return KVCacheSize(num_blocks, min(wanted, num_blocks * config.block_size))


def options_for(config: EngineConfig) -> str:
    """Return the names of the options that change how long a sequence fits, for messages."""
    memory = "gpu_memory_utilization" if torch.device(config.device).type == "cuda" else "kv_cache_memory"
    return f"{OPTIONS} or {memory}"


def options_for_memory(config: EngineConfig) -> str:
    """Return the names of the options that change how much memory an engine takes, for messages."""
    return f"max_num_seqs (--max-num-seqs), max_num_batched_tokens, max_loras, {options_for(config)}"


def _default_num_blocks(config: EngineConfig, max_model_len: int, affordable: int) -> int:
    """Return the number of blocks that no option sets.

    On a GPU this is all that the memory affords, on a CPU enough for sequences of typical length or for a long one.
    """
    if torch.device(config.device).type == "cuda":
        return affordable
    usual = config.max_num_seqs * num_blocks_for(min(max_model_len, TYPICAL_TOKENS), config.block_size)
    return min(affordable, max(usual, num_blocks_for(max_model_len, config.block_size)))
