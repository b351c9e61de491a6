"""The memory of the KV cache: its tensors and how large it should be."""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fastinfer.engine.config import EngineConfig
from fastinfer.errors import RequestError

# Of the memory that is available when the cache is sized without being told.
MEMORY_SHARE = 0.25
# Few requests fill a long context; beyond this many tokens each, preemption is cheaper than the memory.
TYPICAL_TOKENS = 2048

# One fp32 scale per token and head; uint8 is int4: two elements a byte, and two fp16 for so many elements.
QUANTIZED_DTYPES = (torch.int8, torch.float8_e4m3fn, torch.uint8)
INT4_KEY_GROUP = 16
INT4_VALUE_GROUP = 64


@dataclass(frozen=True)
class LayerCache:
    """One layer's keys and values, and their scales where they are quantised, [num_blocks, block_size,
    num_kv_heads, ...]: see :func:`head_shapes`."""

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for tensor in (self.k, self.v, self.k_scale, self.v_scale) if tensor is not None]


@dataclass(frozen=True)
class KVCacheTensors:
    """The cache of all layers."""

    layers: list[LayerCache]

    @classmethod
    def empty(
        cls,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: str,
    ) -> "KVCacheTensors":
        """Uninitialised tensors: on a CPU a page costs memory only once it is written."""

        shapes = head_shapes(head_dim, dtype)

        def tensors() -> Iterator[Tensor]:
            for shape, element in shapes:
                yield torch.empty(num_blocks, block_size, num_kv_heads, *shape, dtype=element, device=device)

        return cls([LayerCache(*tensors()) for _ in range(num_layers)])

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks, each pair from its first to its second; all are read before any is written."""
        source, target = torch.tensor(pairs, device=self.layers[0].k.device).T
        for layer in self.layers:
            for tensor in layer.tensors:
                # As bytes: torch has no indexing for float8.
                tensor.view(torch.uint8)[target] = tensor.view(torch.uint8)[source]

    def __iter__(self) -> Iterator[LayerCache]:
        return iter(self.layers)


def head_shapes(head_dim: int, dtype: torch.dtype) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of what the cache holds of a token's head: key, value, and their scales if they have some.

    Raises:
        RequestError: an odd ``head_dim`` for a cache of two elements a byte.
    """
    if dtype == torch.uint8:
        if head_dim % 2:
            raise RequestError(f"kv_cache_dtype int4 (torch.uint8) needs an even head_dim, got {head_dim}")
        groups = (-(-head_dim // group) for group in (INT4_KEY_GROUP, INT4_VALUE_GROUP))
        return [((head_dim // 2,), dtype)] * 2 + [((count, 2), torch.float16) for count in groups]
    scale: tuple[tuple[int, ...], torch.dtype] = (), torch.float32
    return [((head_dim,), dtype)] * 2 + [scale] * 2 * (dtype in QUANTIZED_DTYPES)


def token_bytes(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Size of one token's keys and values in all layers, scales included."""
    head = sum(math.prod(shape) * element.itemsize for shape, element in head_shapes(head_dim, dtype))
    return num_layers * num_kv_heads * head


def available_memory(device: str) -> int:
    """Bytes that can be allocated on the device without pushing anything out."""
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
    """Blocks for ``max_num_seqs`` sequences of usual length, as far as a share of the memory allows.

    Args:
        block_size: tokens per block.
        block_bytes: size of a block over all layers, keys and values.
        max_model_len: longest sequence, in tokens.
        max_num_seqs: sequences that run at the same time.
        available_bytes: from :func:`available_memory`; ``MEMORY_SHARE`` of it may be used.
    """
    usual = max_num_seqs * num_blocks_for(min(max_model_len, TYPICAL_TOKENS), block_size)
    affordable = int(available_bytes * MEMORY_SHARE) // block_bytes
    return min(affordable, max(usual, num_blocks_for(max_model_len, block_size)))


def choose_num_blocks(config: EngineConfig, token_bytes: int, max_model_len: int) -> int:
    """Blocks of an engine's cache; at least one sequence of the greatest length fits, or it could never be served.

    Args:
        config: of the engine.
        token_bytes: size of a token's keys and values.
        max_model_len: longest sequence, in tokens.

    Raises:
        RequestError: the cache does not fit into memory, or the longest sequence not into the cache.
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


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold this many tokens."""
    return -(-num_tokens // block_size)
