"""Tensors of the KV cache: keys and values of all layers, in blocks."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fastinfer.errors import RequestError

# int8 and fp8 have one fp32 scale per token and head. uint8 stands for int4: two elements per byte, and an fp16 scale
# and minimum for each group of this many elements.
QUANTIZED_DTYPES = (torch.int8, torch.float8_e4m3fn, torch.uint8)
INT4_KEY_GROUP = 16
INT4_VALUE_GROUP = 64


@dataclass(frozen=True)
class LayerCache:
    """Keys and values of one layer, with their scales if the cache is quantised.

    All tensors are [num_blocks, block_size, num_kv_heads, ...]; for the last dimensions see :func:`head_shapes`.

    Attributes:
        k, v, k_scale, v_scale: see above.
        group: number of the group of layers whose blocks have the same numbers.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    group: int = field(default=0, kw_only=True)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the layer."""
        return [tensor for tensor in (self.k, self.v, self.k_scale, self.v_scale) if tensor is not None]


@dataclass(frozen=True)
class KVCache:
    """KV cache of all layers.

    Attributes:
        layers: the caches of the layers; empty while the memory is freed.
        make_layers: function that allocates the layers.
    """

    layers: list[LayerCache]
    make_layers: Callable[[], list[LayerCache]]

    @classmethod
    def empty(
        cls,
        groups: Sequence[int],
        num_blocks: Sequence[int],
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: str,
    ) -> "KVCache":
        """Allocate an uninitialised cache; on a CPU a page takes memory only once it is written.

        Args:
            groups: number of each layer's group.
            num_blocks: number of blocks of each group.
            block_size: tokens per block.
            num_kv_heads: number of key and value heads.
            head_dim: number of elements of a head.
            dtype: dtype of the elements; uint8 stands for int4.
            device: device of the cache.

        Raises:
            RequestError: ``head_dim`` is odd and the cache has two elements per byte.
        """
        shapes = head_shapes(head_dim, dtype)

        def tensors(group: int) -> Iterator[Tensor]:
            for shape, element in shapes:
                yield torch.empty(num_blocks[group], block_size, num_kv_heads, *shape, dtype=element, device=device)

        def layers() -> list[LayerCache]:
            return [LayerCache(*tensors(group), group=group) for group in groups]

        return cls(layers(), layers)

    def free(self) -> None:
        """Free the memory; what was cached is lost."""
        self.layers.clear()

    def allocate(self) -> None:
        """Allocate the memory again after :meth:`free`, uninitialised; does nothing if there is any."""
        if not self.layers:
            self.layers.extend(self.make_layers())

    def copy_blocks(self, pairs: list[tuple[int, int]], group: int = 0) -> None:
        """Copy blocks of a group, each pair from its first block to its second; all are read before any is written."""
        source, target = torch.tensor(pairs, device=self.layers[0].k.device).T
        for layer in self.layers:
            for tensor in layer.tensors if layer.group == group else ():
                # As bytes, because torch cannot index float8.
                tensor.view(torch.uint8)[target] = tensor.view(torch.uint8)[source]

    @property
    def rows(self) -> list[Tensor]:
        """All tensors of all layers as [num_blocks, bytes of a block] uint8, which share their memory."""
        return [tensor.view(torch.uint8).flatten(1) for layer in self.layers for tensor in layer.tensors]

    def __iter__(self) -> Iterator[LayerCache]:
        return iter(self.layers)


def head_shapes(head_dim: int, dtype: torch.dtype) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Return shapes and dtypes of one head of one token in the cache: key, value, and their scales if it is quantised.

    Raises:
        RequestError: ``head_dim`` is odd and the cache has two elements per byte.
    """
    if dtype == torch.uint8:
        if head_dim % 2:
            raise RequestError(f"kv_cache_dtype int4 (torch.uint8) needs an even head_dim, got {head_dim}")
        groups = (-(-head_dim // group) for group in (INT4_KEY_GROUP, INT4_VALUE_GROUP))
        return [((head_dim // 2,), dtype)] * 2 + [((count, 2), torch.float16) for count in groups]
    scale: tuple[tuple[int, ...], torch.dtype] = (), torch.float32
    return [((head_dim,), dtype)] * 2 + [scale] * 2 * (dtype in QUANTIZED_DTYPES)


def token_bytes(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Return the size in bytes of one token's keys and values in all layers, including scales."""
    head = sum(math.prod(shape) * element.itemsize for shape, element in head_shapes(head_dim, dtype))
    return num_layers * num_kv_heads * head


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Return the number of blocks that hold this many tokens."""
    return -(-num_tokens // block_size)
