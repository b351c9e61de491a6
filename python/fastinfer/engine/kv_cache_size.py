"""The size of the KV cache."""

import os

import torch

from fastinfer.engine.config import EngineConfig
from fastinfer.errors import RequestError
from fastinfer.models.kv_cache import num_blocks_for

# Share of the available memory that a cache of default size may use.
MEMORY_SHARE = 0.25
# Sequence length in tokens that the default size provides for. Few requests use a long context to the end, and for
# those that do, preempting others costs less than the memory.
TYPICAL_TOKENS = 2048


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


def default_num_blocks(
    block_size: int, block_bytes: int, max_model_len: int, max_num_seqs: int, available_bytes: int
) -> int:
    """Return the default number of blocks, which holds ``max_num_seqs`` sequences of typical length.

    The result is at least enough for one sequence of ``max_model_len`` tokens, but at most what fits into
    ``MEMORY_SHARE`` of the available memory.

    Args:
        block_size: tokens per block.
        block_bytes: bytes of a block: keys and values of all layers.
        max_model_len: longest sequence in tokens.
        max_num_seqs: maximum number of running sequences.
        available_bytes: available memory, see :func:`available_memory`.
    """
    usual = max_num_seqs * num_blocks_for(min(max_model_len, TYPICAL_TOKENS), block_size)
    affordable = int(available_bytes * MEMORY_SHARE) // block_bytes
    return min(affordable, max(usual, num_blocks_for(max_model_len, block_size)))


def choose_num_blocks(config: EngineConfig, token_bytes: int, max_model_len: int) -> int:
    """Return the number of blocks for an engine's KV cache.

    Args:
        config: configuration of the engine.
        token_bytes: bytes of one token's keys and values in all layers of all models.
        max_model_len: longest sequence in tokens.

    Raises:
        RequestError: the cache does not fit into memory, or the longest sequence does not fit into the cache.
    """
    block_bytes = config.block_size * token_bytes
    available = available_memory(config.device)
    if config.num_kv_blocks is not None:
        num_blocks = config.num_kv_blocks
    elif config.kv_cache_memory is not None:
        num_blocks = config.kv_cache_memory // block_bytes
    else:
        num_blocks = default_num_blocks(config.block_size, block_bytes, max_model_len, config.max_num_seqs, available)
    if num_blocks * block_bytes > available:
        raise RequestError(
            f"the KV cache must fit into the {available} bytes of memory available, "
            f"got {num_blocks} blocks of {block_bytes} bytes"
        )
    needed = num_blocks_for(max_model_len, config.block_size)
    if num_blocks < needed:
        raise RequestError(
            f"max_model_len={max_model_len} needs a KV cache of {needed * block_bytes} bytes, "
            f"got {num_blocks * block_bytes}: lower max_model_len or raise kv_cache_memory"
        )
    return num_blocks
