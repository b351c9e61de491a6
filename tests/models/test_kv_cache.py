"""The cache's tensors: their shapes, their sizes, and copies of blocks."""

from dataclasses import replace

import pytest
import torch
from support import mixed_decoder

from fastinfer.errors import RequestError
from fastinfer.models.config import KVShape
from fastinfer.models.kv_cache import KVCache, LayerCache, num_blocks_for, token_bytes
from fastinfer.models.state_cache import state_bytes
from fastinfer.models.state_config import LinearAttentionConfig, Mamba2Config, ShortConvConfig, StateConfig

CONFIG = replace(mixed_decoder.CONFIG, num_kv_heads=2, head_dim=80)
FLOATS = {torch.float32: 4, torch.bfloat16: 2, torch.float16: 2}  # bytes of an element
BYTES = [torch.int8, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", [*FLOATS, *BYTES, torch.uint8])
def test_tensors_have_their_own_memory_in_every_layer(dtype: torch.dtype) -> None:
    """Heads of 80 in int4 are 40 bytes, with an fp16 scale and minimum per 16 elements of a key and 64 of a value."""
    tensors = KVCache.of_model(replace(CONFIG, num_layers=3), [5], 4, dtype, "cpu")
    assert len(tensors.layers) == 3
    every = [tensor for cache in tensors for tensor in cache.tensors]
    assert len({tensor.data_ptr() for tensor in every}) == len(every) == (6 if dtype in FLOATS else 12)
    for cache in tensors:
        assert cache.k.shape == cache.v.shape == (5, 4, 2, 40 if dtype == torch.uint8 else 80)
        assert cache.k.dtype == cache.v.dtype == dtype
        if dtype in FLOATS:
            assert (cache.k_scale, cache.v_scale) == (None, None)
            continue
        assert cache.k_scale is not None
        assert cache.v_scale is not None
        assert cache.k_scale.shape == (5, 4, 2, *((5, 2) if dtype == torch.uint8 else ()))
        assert cache.v_scale.shape == (5, 4, 2, *((2, 2) if dtype == torch.uint8 else ()))
        assert cache.k_scale.dtype == cache.v_scale.dtype == (torch.float16 if dtype == torch.uint8 else torch.float32)


@pytest.mark.parametrize(
    ("dtype", "head_bytes"),
    [
        *((dtype, 2 * 80 * size) for dtype, size in FLOATS.items()),
        *((dtype, 2 * (80 + 4)) for dtype in BYTES),
        (torch.uint8, 2 * 40 + (5 + 2) * 4),
    ],
)
def test_size_of_a_token(dtype: torch.dtype, head_bytes: int) -> None:
    assert token_bytes(KVShape(2, 80), dtype) == 2 * head_bytes
    tensors = KVCache.of_model(replace(CONFIG, num_layers=3), [5], 4, dtype, "cpu")
    assert sum(tensor.nbytes for cache in tensors for tensor in cache.tensors) == 5 * 4 * 3 * 2 * head_bytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.uint8])
def test_copied_blocks(dtype: torch.dtype) -> None:
    tensors = KVCache.of_model(replace(CONFIG, num_layers=2, head_dim=8), [6], 4, dtype, "cpu")
    every = [tensor for cache in tensors for tensor in cache.tensors]
    for index, tensor in enumerate(every):
        numbers = 99 * torch.rand(tensor.shape, generator=torch.Generator().manual_seed(index))
        tensor.copy_(numbers.to(tensor.dtype))
    before = [tensor.float().clone() for tensor in every]
    tensors.copy_blocks([(0, 3), (3, 1)])  # all is read before anything is written
    for tensor, old in zip(every, before, strict=True):
        assert torch.equal(tensor.float(), old[[0, 3, 2, 0, 4, 5]])


def test_layers_of_different_shapes_and_a_shared_cache() -> None:
    """Layer 2 attends to the keys and values of layer 0: what is copied or stored has them once."""
    shapes = (KVShape(2, 8), KVShape(1, 16), KVShape(2, 8))
    config = replace(CONFIG, num_layers=3, windows=(4, 0, 4), kv_shapes=shapes, kv_layers=(0, 1, 0))
    cache = KVCache.of_model(config, [3, 6], 4, torch.float32, "cpu", group=lambda window: int(window > 0))
    first, second, third = cache
    assert isinstance(first, LayerCache)
    assert isinstance(second, LayerCache)
    assert third is first
    assert (first.k.shape, first.group) == ((6, 4, 2, 8), 1)
    assert (second.v.shape, second.group) == ((3, 4, 1, 16), 0)
    assert [row.shape for row in cache.rows] == [(6, 256), (6, 256), (3, 256), (3, 256)]
    first.k.copy_(torch.arange(6.0).view(6, 1, 1, 1).expand_as(first.k))
    cache.copy_blocks([(0, 3), (3, 1)], group=1)  # twice would give another result
    assert first.k[:, 0, 0, 0].tolist() == [0, 3, 2, 0, 4, 5]
    cache.free()
    cache.allocate()
    assert cache.layers[2] is cache.layers[0] is not first
    cache.allocate()  # of what is there
    assert len(cache.layers) == 3


STATES = [Mamba2Config(2, 16, 32, 1, 4), ShortConvConfig(24, 3), LinearAttentionConfig(2, 4, 16, 32, 4)]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("states", STATES)
def test_slots_of_states(states: StateConfig, dtype: torch.dtype) -> None:
    """Views of freed memory would keep it, and those of new memory are others."""
    config = replace(CONFIG, num_layers=2, state_layers=(True, False), states=states, windows=())
    cache = KVCache.of_model(config, [6], 4, torch.float32, "cpu", num_states=5, state_dtype=dtype)
    saved = (4 - dtype.itemsize) * (states.kernel_size - 1) * states.conv_dim  # the other states are fp32
    assert sum(row.shape[1] for row in cache.state_rows) == state_bytes(states) - saved
    assert {row.shape[0] for row in cache.state_rows} == {5}
    cache.free()
    cache.allocate()
    for row, tensor in zip(cache.state_rows, cache.layers[0].tensors, strict=True):
        assert row.data_ptr() == tensor.data_ptr()


def test_two_elements_share_a_byte() -> None:
    with pytest.raises(RequestError, match="even head_dim, got 9"):
        LayerCache.empty(KVShape(1, 9), 2, 4, torch.uint8, "cpu")


@pytest.mark.parametrize(("num_tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_blocks_of_tokens(num_tokens: int, blocks: int) -> None:
    assert num_blocks_for(num_tokens, 4) == blocks
