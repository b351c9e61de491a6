"""Sizes of the caches of a model's layers, from which the size of the whole KV cache follows."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fastinfer.engine.config import EngineConfig
from fastinfer.models.config import ModelConfig
from fastinfer.models.kv_cache import feature_dtype, index_key_dtype, token_bytes
from fastinfer.models.sparse_attention import codes_bytes, has_key_codes, has_value_codes
from fastinfer.models.state_cache import state_bytes


class CacheSize(NamedTuple):
    """Size of the cache of a layer.

    Attributes:
        model, layer: number of the model, and of the layer.
        window: length of the attention window that decides the layer's group, 0 for none; ``None`` for a layer with a
            state.
        num_bytes: bytes of a token's keys and values, or of a sequence's state.
    """

    model: int
    layer: int
    window: int | None
    num_bytes: int


def cache_sizes(config: EngineConfig, models: Sequence[ModelConfig]) -> Iterator[CacheSize]:
    """Generate the sizes of the caches of all layers that have one.

    See :func:`fastinfer.engine.construction.kv_cache_size` for the groups of layers and for the arguments.
    """
    for number, model in enumerate(models):
        for layer in range(model.num_layers):
            if model.has_state(layer):
                # A draft model has no such layers.
                assert model.states is not None
                yield CacheSize(number, layer, None, state_bytes(model.states))
                continue
            if model.kv_layer(layer) != layer:
                continue
            window = 0 if len(models) > 1 or config.has_offloading else model.window(layer)
            size = token_bytes(model.kv_shape(layer), config.kv_cache_dtype)
            if number == 0 and config.sparse_attention is not None and has_key_codes(model, layer):
                with_values = has_value_codes(model, config.block_size, config.device)
                size += codes_bytes(model.kv_shape(layer), with_values=with_values)
            if model.indexer is not None and model.has_indexer(layer):
                size += model.indexer.head_dim * index_key_dtype(config.kv_cache_dtype).itemsize
            if model.has_features:
                size += model.hidden_size * feature_dtype(config.kv_cache_dtype).itemsize
            yield CacheSize(number, layer, window if window < (config.max_model_len or model.max_position) else 0, size)
