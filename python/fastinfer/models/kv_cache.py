"""Tensors of the KV cache: keys and values in blocks, and the states of layers with linear attention in slots."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from fastinfer.errors import RequestError
from fastinfer.models.config import KVShape, ModelConfig
from fastinfer.models.sparse_attention import CODES_DTYPE, codes_shape, has_key_codes, has_value_codes
from fastinfer.models.state_cache import StateCache

# int8 and fp8 have one fp32 scale per token and head. uint8 stands for int4: two elements per byte, and an fp16 scale
# and minimum for each group of this many elements.
QUANTIZED_DTYPES = (torch.int8, torch.float8_e4m3fn, torch.uint8)
INT4_KEY_GROUP = 16
INT4_VALUE_GROUP = 64


@dataclass(frozen=True)
class LayerCache:
    """Keys and values of one layer, with their scales if the cache is quantised.

    Keys, values and scales are [num_blocks, block_size, num_kv_heads, ...]; for the last dimensions see
    :func:`head_shapes`.

    Attributes:
        k, v, k_scale, v_scale: see above. Values within the keys are a view of them, and have the keys' scales.
        group: number of the group of layers whose blocks have the same numbers.
        key_codes: [num_blocks, num_kv_heads, head_dim / 8 + 1, block_size] int32; codes of the keys, see
            :func:`fastinfer.ops.store_key_codes`. ``None`` for a layer without sparse attention.
        value_codes: the same of the values, see :func:`fastinfer.ops.store_value_codes`; ``None`` where tokens attend
            to the chosen pages alone.
        features: [num_blocks, block_size, 1, hidden]; features of each token, of the layer of a draft head; ``None``
            for other layers.
        index_keys: [num_blocks, block_size, 1, head_dim]; key of each token for the layer's indexer, see
            :class:`fastinfer.models.indexer.Indexer`; ``None`` for other layers.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    group: int = field(default=0, kw_only=True)
    key_codes: Tensor | None = field(default=None, kw_only=True)
    value_codes: Tensor | None = field(default=None, kw_only=True)
    features: Tensor | None = field(default=None, kw_only=True)
    index_keys: Tensor | None = field(default=None, kw_only=True)

    @classmethod
    def empty(
        cls,
        shape: KVShape,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: str,
        group: int = 0,
        with_key_codes: bool = False,
        with_value_codes: bool = False,
    ) -> "LayerCache":
        """Allocate an uninitialised cache; on a CPU a page takes memory only once it is written.

        Args:
            shape: shape of a token's keys and values.
            num_blocks: number of blocks.
            block_size: tokens per block.
            dtype: dtype of the elements; uint8 stands for int4.
            device: device of the cache.
            group: see above.
            with_key_codes, with_value_codes: whether there are codes of keys, and of values, see above.

        Raises:
            RequestError: the size of a head is odd, or values are within the keys, and the cache has two elements per
                byte.
        """
        sizes = num_blocks, block_size, shape.num_heads
        heads = head_shapes(shape, dtype)
        tensors = [torch.empty(*sizes, *head, dtype=element, device=device) for head, element in heads]
        if not shape.value_dim:
            size = num_blocks, *codes_shape(shape, block_size)
            codes = [
                torch.empty(size, dtype=CODES_DTYPE, device=device) if wanted else None
                for wanted in (with_key_codes, with_value_codes)
            ]
            return cls(*tensors, group=group, key_codes=codes[0], value_codes=codes[1])
        k, k_scale = tensors[0], tensors[1] if len(tensors) > 1 else None
        return cls(k, k[..., : shape.value_dim], k_scale, k_scale, group=group)

    def with_index_keys(self, head_dim: int) -> "LayerCache":
        """Return the same cache with uninitialised keys for an indexer, of this number of elements."""
        shape = *self.k.shape[:2], 1, head_dim
        keys = torch.empty(shape, dtype=index_key_dtype(self.k.dtype), device=self.k.device)
        return replace(self, index_keys=keys)

    @property
    def _values_in_keys(self) -> bool:
        return self.v.shape[3] < self.k.shape[3]

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the layer; values within the keys are none of their own."""
        tensors = [self.k, self.k_scale] if self._values_in_keys else [self.k, self.v, self.k_scale, self.v_scale]
        tensors += [self.key_codes, self.value_codes, self.features, self.index_keys]
        return [tensor for tensor in tensors if tensor is not None]


@dataclass(frozen=True)
class KVCache:
    """KV cache of all layers.

    Attributes:
        layers: the caches of the layers, of keys and values or of states; empty while the memory is freed. A layer that
            attends to the keys and values of another has the same cache.
        make_layers: function that allocates the layers.
    """

    layers: list[LayerCache | StateCache]
    make_layers: Callable[[], list[LayerCache | StateCache]]

    @classmethod
    def of_model(
        cls,
        config: ModelConfig,
        num_blocks: Sequence[int],
        block_size: int,
        dtype: torch.dtype,
        device: str | Sequence[str],
        *,
        group: Callable[[int], int] = lambda window: 0,
        num_states: int = 1,
        state_dtype: torch.dtype = torch.float32,
        with_key_codes: bool = False,
        layers: range | None = None,
    ) -> "KVCache":
        """Allocate the uninitialised cache of a model.

        Args:
            config: configuration of the model.
            num_blocks: number of blocks of each group.
            block_size, dtype: same as for :meth:`LayerCache.empty`.
            device: device of the cache, or the device of each layer of the model.
            group: function from the length of a layer's window to the number of its group.
            num_states: number of slots for states, if the model has layers with linear attention.
            state_dtype: dtype of the hidden states.
            with_key_codes: whether layers that can have sparse attention get codes of their keys, and of their values
                where :func:`fastinfer.models.sparse_attention.has_value_codes` says so.
            layers: layers that have a cache; ``None`` for all.

        Raises:
            RequestError: same as for :meth:`LayerCache.empty`.
        """

        def layer(index: int) -> LayerCache | StateCache:
            own_device = device if isinstance(device, str) else device[index]
            if config.has_state(index):
                assert config.states is not None
                return StateCache.empty(config.states, num_states, state_dtype, own_device)
            number = group(config.window(index))
            sizes = num_blocks[number], block_size, dtype, own_device
            has_codes = with_key_codes and has_key_codes(config, index)
            with_values = has_codes and has_value_codes(config, block_size, own_device)
            cache = LayerCache.empty(config.kv_shape(index), *sizes, number, has_codes, with_values)
            if config.indexer is not None and config.has_indexer(index):
                cache = cache.with_index_keys(config.indexer.head_dim)
            if not config.has_features:
                return cache
            shape = num_blocks[number], block_size, 1, config.hidden_size
            return replace(cache, features=torch.empty(shape, dtype=feature_dtype(dtype), device=own_device))

        indices = range(config.num_layers) if layers is None else layers

        def make_layers() -> list[LayerCache | StateCache]:
            own = {index: layer(index) for index in indices if config.kv_layer(index) == index}
            return [own[config.kv_layer(index)] for index in indices]

        return cls(make_layers(), make_layers)

    def free(self) -> None:
        """Free the memory; what was cached is lost."""
        self.layers.clear()
        for views in ("rows", "state_rows"):  # which would keep the memory
            vars(self).pop(views, None)

    def allocate(self) -> None:
        """Allocate the memory again after :meth:`free`, uninitialised; does nothing if there is any."""
        if not self.layers:
            self.layers.extend(self.make_layers())

    def copy_blocks(self, pairs: list[tuple[int, int]], group: int = 0) -> None:
        """Copy blocks of a group, each pair from its first block to its second; all are read before any is written."""
        tensors = [tensor for layer in self._with_blocks if layer.group == group for tensor in layer.tensors]
        numbers = torch.tensor(pairs)
        numbers_on = {device: numbers.to(device).T for device in {tensor.device for tensor in tensors}}
        for tensor in tensors:
            source, target = numbers_on[tensor.device]
            # As bytes, because torch cannot index float8.
            tensor.view(torch.uint8)[target] = tensor.view(torch.uint8)[source]

    @cached_property
    def rows(self) -> list[Tensor]:
        """All tensors of layers with blocks as [num_blocks, bytes of a block] uint8, views."""
        return [tensor.view(torch.uint8).flatten(1) for layer in self._with_blocks for tensor in layer.tensors]

    @cached_property
    def state_rows(self) -> list[Tensor]:
        """All tensors of states as [num_states, bytes of a slot] uint8, views."""
        layers = (layer for layer in self.layers if isinstance(layer, StateCache))
        return [tensor.flatten(1).view(torch.uint8) for layer in layers for tensor in layer.tensors]

    @property
    def _with_blocks(self) -> list[LayerCache]:
        """The caches of keys and values, each once."""
        return list({id(layer): layer for layer in self.layers if isinstance(layer, LayerCache)}.values())

    def __iter__(self) -> Iterator[LayerCache | StateCache]:
        return iter(self.layers)


def head_shapes(shape: KVShape, dtype: torch.dtype) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Return shapes and dtypes of one head of one token in the cache: key, value, and their scales if it is quantised.

    If values are within the keys, there is only the key, and its scale.

    Raises:
        RequestError: ``head_dim`` is odd, or values are within the keys, and the cache has two elements per byte.
    """
    head_dim = shape.head_dim
    if dtype == torch.uint8:
        if shape.value_dim:
            raise RequestError("kv_cache_dtype must not be int4 (torch.uint8) for a model with latent attention")
        if head_dim % 2:
            raise RequestError(f"kv_cache_dtype int4 (torch.uint8) needs an even head_dim, got {head_dim}")
        groups = (-(-head_dim // group) for group in (INT4_KEY_GROUP, INT4_VALUE_GROUP))
        return [((head_dim // 2,), dtype)] * 2 + [((count, 2), torch.float16) for count in groups]
    scale: tuple[tuple[int, ...], torch.dtype] = (), torch.float32
    parts = 1 if shape.value_dim else 2
    return [((head_dim,), dtype)] * parts + [scale] * parts * (dtype in QUANTIZED_DTYPES)


def token_bytes(shape: KVShape, dtype: torch.dtype) -> int:
    """Return the size in bytes of one token's keys and values in a layer, including scales."""
    heads = head_shapes(shape, dtype)
    return shape.num_heads * sum(math.prod(head) * element.itemsize for head, element in heads)


def feature_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the features in a cache whose keys and values have this one."""
    return torch.float32 if dtype == torch.float32 else torch.bfloat16


def index_key_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the indexers' keys in a cache whose keys and values have this one."""
    return torch.bfloat16 if dtype in QUANTIZED_DTYPES else dtype


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Return the number of blocks that hold this many tokens."""
    return -(-num_tokens // block_size)
