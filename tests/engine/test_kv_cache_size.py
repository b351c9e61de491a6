"""Size of the KV cache and longest sequence, on machines of many sizes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from support import mixed_decoder

from fastinfer.cli.memory_bounds import attended_positions, kv_cache_bytes
from fastinfer.engine import kv_cache_size
from fastinfer.engine.config import EngineConfig
from fastinfer.engine.construction import kv_cache_size as choose_size
from fastinfer.engine.kv_cache_size import KVCacheSize, available_memory, choose_kv_cache_size, room_on
from fastinfer.errors import RequestError
from fastinfer.models.config import KVShape
from fastinfer.models.kv_cache import KVCache
from fastinfer.utils.host_memory import HostMemory

GIB = 2**30
# Longest sequence, and bytes of a token's keys and values in fp16: layers * KV heads * head_dim * 2 * 2.
MODELS = {
    "Llama-3.1-8B": (131_072, 32 * 8 * 128 * 4),
    "Qwen3-4B": (262_144, 36 * 8 * 128 * 4),
    "Phi-3-128k": (131_072, 32 * 32 * 96 * 4),
    "Gemma-3-4B": (131_072, 34 * 4 * 256 * 4),
    "Qwen2.5-7B": (131_072, 28 * 4 * 128 * 4),
}


def memory_of(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr(kv_cache_size, "available_memory", lambda device: num_bytes)


def choose(limit: int, token_bytes: int, weight_bytes: int = 0, **options: Any) -> KVCacheSize:
    config = EngineConfig(**options)
    return choose_kv_cache_size(config, limit, {0: token_bytes}, room=room_on(config, config.device, weight_bytes))


def cache_of(num_blocks: int, max_model_len: int) -> KVCacheSize:
    return KVCacheSize((0,), (num_blocks,), max_model_len, num_blocks * 32 * 30)


def test_available_memory_of_a_cpu_is_the_host_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache_size, "host_memory", lambda: HostMemory(9000, 5000))
    assert available_memory("cpu") == 5000


@pytest.mark.parametrize("memory", [16, 32, 64, 512])
@pytest.mark.parametrize("model", MODELS)
def test_default_options_take_the_longest_context_that_fits(
    model: str, memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit, token_bytes = MODELS[model]
    weights = 5 * GIB
    memory_of(monkeypatch, memory * GIB)
    size = choose(limit, token_bytes, weights)
    affordable = (memory * GIB - weights) // 2
    (num_blocks,) = size.num_blocks
    assert size.max_model_len <= num_blocks * 32
    assert num_blocks * 32 * token_bytes <= affordable
    # One block more would not fit, unless the model's own limit is reached.
    assert size.max_model_len == limit or (size.max_model_len + 32) * token_bytes > affordable


def test_the_default_size_provides_for_sequences_of_typical_length(monkeypatch: pytest.MonkeyPatch) -> None:
    def blocks(limit: int, available_bytes: int) -> int:
        memory_of(monkeypatch, available_bytes)
        return choose(limit, 30, max_num_seqs=4).num_blocks[0]

    assert blocks(100, 10**9) == 4 * 4  # 100 tokens take 4 blocks
    assert blocks(100_000, 10**9) == 3125  # one long sequence, more than four of 2,048
    assert blocks(100, 2 * 10 * 32 * 30) == 10  # half of the memory
    assert blocks(4096, 10**9) == 4 * 2048 // 32


@pytest.mark.parametrize("limits", [{"kv_cache_memory": 1000 * 32 * 30}, {"num_kv_blocks": 1000}])
def test_a_given_size_limits_the_context(limits: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    memory_of(monkeypatch, 10**9)
    assert choose(100_000, 30, **limits) == cache_of(1000, 32_000)
    assert choose(20_000, 30, **limits) == cache_of(1000, 20_000)
    assert choose(100_000, 30, max_model_len=500, **limits) == cache_of(1000, 500)


def test_weights_that_are_still_to_be_loaded_count(monkeypatch: pytest.MonkeyPatch) -> None:
    memory_of(monkeypatch, 10**9)
    before = choose(10**6, 1000, weight_bytes=6 * 10**8)
    memory_of(monkeypatch, 4 * 10**8)
    assert before == choose(10**6, 1000)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 101}, "max_model_len must be at most the model's 100, got 101"),
        (
            {"max_model_len": 64, "num_kv_blocks": 1},
            "max_model_len=64 needs a KV cache of 1920 bytes, got 960: change max_model_len (--context), "
            "kv_cache_dtype (--kv-cache-dtype) or kv_cache_memory",
        ),
        ({"kv_cache_memory": 10}, "one block needs a KV cache of 960 bytes, got 0: change max_model_len"),
        (
            {"num_kv_blocks": 100},
            "the KV cache must fit into the 9000 bytes of memory that are available beside the weights, got 100 blocks "
            "and 96000 bytes",
        ),
    ],
)
def test_sizes_that_do_not_fit(options: dict[str, int], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    memory_of(monkeypatch, 10_000)
    with pytest.raises(RequestError) as error:
        choose(100, 30, weight_bytes=1000, **options)
    assert str(error.value).startswith(message)


def test_a_store_in_host_memory_leaves_less_for_the_cache_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    memory_of(monkeypatch, 9 * GIB)
    size = choose(10**9, 2**16, weight_bytes=GIB, kv_offloading_size=4)
    assert size.num_blocks[0] * 32 * 2**16 == 2 * GIB
    with pytest.raises(
        RequestError, match=f"into the {4 * GIB} bytes .* beside the weights and kv_offloading_size, got"
    ):
        choose(10**9, 2**16, weight_bytes=GIB, kv_offloading_size=4, kv_cache_memory=5 * GIB)
    message = "kv_offloading_size must fit into the 3.0 GiB of memory that are available beside the weights, got 4"
    with pytest.raises(RequestError, match=message):
        choose(10**9, 2**16, weight_bytes=6 * GIB, kv_offloading_size=4)


def test_a_store_in_host_memory_takes_nothing_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (GIB, GIB))
    with_store, without = (choose(10**9, 2**16, device="cuda", kv_offloading_size=size) for size in (2, None))
    assert with_store == without


def test_a_gpu_is_filled_to_its_utilization(monkeypatch: pytest.MonkeyPatch) -> None:
    total, free = 80 * GIB, 79 * GIB
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (free, total))
    size = choose(10**9, 2**16, weight_bytes=15 * GIB, device="cuda", gpu_memory_utilization=0.75)
    assert size.num_blocks[0] * 32 * 2**16 == (79 - 15 - 20) * GIB
    with pytest.raises(RequestError, match=r"gpu_memory_utilization$"):
        choose(10**9, 2**16, weight_bytes=79 * GIB, device="cuda")


GEMMA_3_4B = {0: 5 * 4 * 256 * 4, 1024: 29 * 4 * 256 * 4}


@pytest.mark.parametrize("memory", [16, 32, 512])
def test_layers_with_a_window_leave_their_memory_to_the_others(memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole context of Gemma-3-4B fits into 11 / 2 GiB; if all blocks were kept, 42,000 tokens would."""
    memory_of(monkeypatch, memory * GIB)
    size = choose_kv_cache_size(EngineConfig(), 131_072, GEMMA_3_4B, room=room_on(EngineConfig(), "cpu", 5 * GIB))
    assert (size.windows, size.max_model_len) == ((0, 1024), 131_072)
    full, windowed = size.num_blocks
    assert full == 131_072 // 32
    num_seqs = 64 if memory > 16 else 17
    assert windowed == num_seqs * (1024 // 32 + 1) + 512 // 32  # their windows, and a step's chunks of prompts
    assert 32 * (full * GEMMA_3_4B[0] + windowed * GEMMA_3_4B[1024]) <= (memory - 5) * GIB / 2


@pytest.mark.parametrize("memory", [3_000_000, 10_000_000, 10**9])
@pytest.mark.parametrize("window", [64, 4096])
def test_all_groups_together_fill_the_memory(window: int, memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    memory_of(monkeypatch, 10**12)
    config = EngineConfig(max_num_batched_tokens=64, kv_cache_memory=memory)
    size = choose_kv_cache_size(config, 10**9, {0: 100, window: 300})
    full, windowed = size.num_blocks
    assert windowed == min(full, window // 32 + 1 + 2)
    assert 0 <= memory - 32 * (100 * full + 300 * windowed) < 32 * 400
    assert size.max_model_len == 32 * full
    short = choose_kv_cache_size(replace(config, kv_cache_memory=10**9), 4096, {0: 100, 64: 300})
    assert short.num_blocks[1] == 64 * 3 + 2


def test_layers_of_different_shapes_are_counted_exactly() -> None:
    """Layers 2 and 3 have no keys and values of their own. In int8 there is a scale of 4 bytes per head."""
    shapes = (KVShape(2, 64), KVShape(1, 128)) * 2
    layers = {"num_layers": 4, "windows": (8, 0) * 2, "kv_shapes": shapes, "kv_layers": (0, 1, 0, 1)}
    model = replace(mixed_decoder.CONFIG, **layers)
    config = EngineConfig(max_num_seqs=2, num_kv_blocks=5, kv_cache_dtype=torch.int8)
    size = choose_size(config, [model])
    assert size.windows == (0, 8)
    cache = KVCache.of_model(model, size.num_blocks, 32, torch.int8, "cpu", group=size.group)
    assert size.num_bytes == sum(row.nbytes for row in cache.rows)
    assert size.num_bytes == 32 * 2 * (5 * (128 + 4) + size.num_blocks[1] * 2 * (64 + 4))
    whole = kv_cache_bytes(model, model.num_kv_heads, torch.int8, 96, 3)
    # A sequence has two blocks in the group with a window, beside the three of a step of prompts.
    assert whole == 32 * 2 * (3 * 3 * (128 + 4) + (3 * 2 + 3) * 2 * (64 + 4))
    assert attended_positions(model, 10) == {KVShape(2, 64): 36 + 2 * 8 + 8, KVShape(1, 128): 55 + 10}


def test_without_layers_of_full_attention_any_context_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    memory_of(monkeypatch, 10**9)
    config = EngineConfig(max_num_seqs=2, max_num_batched_tokens=64)
    blocks = 4096 // 32 + 1 + 2
    assert choose_kv_cache_size(config, 10**6, {4096: 100}) == KVCacheSize((4096,), (blocks,), 10**6, blocks * 3200)
    assert choose_kv_cache_size(config, 100, {4096: 100}) == KVCacheSize((4096,), (2 * 4,), 100, 8 * 3200)
    few = replace(config, num_kv_blocks=100)
    assert choose_kv_cache_size(few, 10**6, {4096: 100}) == KVCacheSize((4096,), (100,), 3200, 100 * 3200)
