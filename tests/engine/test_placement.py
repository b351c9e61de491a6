"""Engines whose layers are in several places: texts, memory and refusals."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.divided import GREEDY, LIMITS, SAMPLED, texts
from support.tiny_folder import write_tiny_folder

from fastinfer import LLM, SamplingParams
from fastinfer.engine import kv_cache_size, placement
from fastinfer.engine.cache_sizes import cache_sizes
from fastinfer.engine.config import EngineConfig
from fastinfer.engine.kv_cache_size import Room
from fastinfer.engine.placement import cache_shares, place_model, room_on_devices, weight_bytes_by_device
from fastinfer.errors import FastinferError
from fastinfer.models import open_checkpoint
from fastinfer.models.config import ModelConfig
from fastinfer.models.layer_places import LayerPlace
from fastinfer.models.state_config import LinearAttentionConfig
from fastinfer.utils.places import Place, parse_places

GIB = 2**30
CONFIG = ModelConfig(
    architecture="llama",
    hidden_size=64,
    intermediate_size=96,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rotary_dim=16,
    vocab_size=320,
    max_position=4096,
    norm_eps=1e-5,
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    families = ("llama3", "qwen3-moe", "qwen3-next")
    return {family: str(write_tiny_folder(tmp_path_factory.mktemp(family), family)) for family in families}


@pytest.mark.parametrize(
    ("family", "device", "options"),
    [
        ("llama3", "cpu=1,cpu=3", {"num_speculative_tokens": 3}),
        ("llama3", "cpu,cpu,cpu", {"dtype": "bfloat16", "kv_cache_dtype": "int8"}),
        ("qwen3-moe", "cpu+cpu=3,cpu=1", {}),
        ("qwen3-next", "cpu,cpu+cpu", {"max_num_seqs": 2}),
    ],
)
def test_texts_are_those_of_one_device(
    folders: dict[str, str], family: str, device: str, options: dict[str, Any]
) -> None:
    one, several = (LLM(folders[family], device=name, **(LIMITS | options)) for name in ("cpu", device))
    for params in (GREEDY, SAMPLED):
        assert texts(several, params) == texts(one, params)
    assert several.embed("a text")[0].embedding == one.embed("a text")[0].embedding


def test_preemption_drafts_and_sleep(folders: dict[str, str]) -> None:
    """In a cache with fewer tokens than the requests have together."""
    limits = LIMITS | {"max_model_len": 130, "kv_cache_memory": 2**18, "num_speculative_tokens": 2}
    path = folders["llama3"]
    one, two = (LLM(path, device=device, draft_model=path, **limits) for device in ("cpu", "cpu,cpu"))
    prompts: Any = [{"prompt_token_ids": [*range(3 + i, 10 + 2 * i)]} for i in range(6)]
    params = SamplingParams(max_tokens=60, seed=5, ignore_eos=True)

    def tokens(llm: LLM) -> list[list[int]]:
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]

    expected = tokens(one)
    assert tokens(two) == expected
    assert two.engine.stats().num_preemptions > 0
    two.sleep(level=2)
    two.wake_up()
    assert tokens(two) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size must be 1 with a model on several devices, got 2"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size must be 1 with a model on several devices, got 2"),
        ({"sparse_attention": 0.9}, "sparse_attention must be None with a model on several devices, got 0.9"),
        ({"device": "cpu,cpu,cpu,cpu,cpu"}, "device: expected at most 4 places for the model's layers, got 5"),
        ({"device": "cpu,cpux"}, "device: expected a list like .*, got 'cpux' in it"),
        ({"device": "cpu+cpu"}, "device: .* needs a model with experts, got one without"),
        ({"device": "cuda=1,cpu=1"}, "device 'cuda' needs "),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="the last case wants a machine without a GPU")
def test_what_is_not_supported_is_refused(folders: dict[str, str], options: dict[str, Any], message: str) -> None:
    with pytest.raises(FastinferError, match=message) as error:
        LLM(folders["llama3"], **{"device": "cpu,cpu", **options})
    assert "\n" not in str(error.value)


# ---- memory ----


def memory_of(monkeypatch: pytest.MonkeyPatch, gib: dict[str, float]) -> None:
    """Let devices have so much free memory; that of a GPU is twice as large."""
    for module in (kv_cache_size, placement):
        monkeypatch.setattr(module, "available_memory", lambda device: int(gib[device] * GIB))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(gib[device] * GIB), int(2 * gib[device] * GIB)))


def test_the_tightest_device_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three layers of a cache are on a GPU with 6 GiB beside the weights, one on another with 1 GiB."""
    memory_of(monkeypatch, {"cuda:0": 10.0, "cuda:1": 2.0, "cpu": 100.0})
    places = [LayerPlace(range(3), "cuda:0", "cpu"), LayerPlace(range(3, 4), "cuda:1")]
    config = EngineConfig(device="cuda:0", gpu_memory_utilization=0.9)
    shares = cache_shares(config, [CONFIG], places)
    assert shares == {"cuda:0": 0.75, "cuda:1": 0.25}
    weights = {"cuda:0": 4 * GIB, "cuda:1": GIB, "cpu": 50 * GIB}
    # On cuda:1 a tenth of 4 GiB is kept for activations.
    assert room_on_devices(config, shares, weights) == Room(4 * GIB, pytest.approx(2.4 * GIB, rel=1e-6))  # type: ignore[arg-type]
    memory_of(monkeypatch, {"cuda:0": 5.0, "cuda:1": 2.0, "cpu": 100.0})
    assert room_on_devices(config, shares, weights).free == int(GIB / 0.75)
    memory_of(monkeypatch, {"cuda:0": 5.0, "cuda:1": 2.0, "cpu": 1.0})
    with pytest.raises(FastinferError, match="device: the weights on cpu need 53687091200 bytes, got 1073741824 avail"):
        room_on_devices(config, shares, weights)


def test_no_device_gets_more_than_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers with windows, with states and of a draft model: the caches that fit as a whole fit on each device."""
    hybrid = CONFIG.__class__(
        **{
            **vars(CONFIG),
            "num_layers": 6,
            "windows": (16, 0, 0, 16, 16, 0),
            "states": LinearAttentionConfig(1, 1, 16, 16, 4),
            "state_layers": (False, False, True, False, False, True),
        }
    )
    places = [LayerPlace(range(2), "cpu"), LayerPlace(range(2, 6), "cuda:1")]
    config = EngineConfig(max_model_len=64)
    shares = cache_shares(config, [hybrid], places)
    assert shares == {"cpu": 1.0, "cuda:1": 1.0}  # all layers without a window, and all states
    with_draft = cache_shares(
        config, [CONFIG, CONFIG], [LayerPlace(range(1), "cpu"), LayerPlace(range(1, 4), "cuda:1")]
    )
    assert with_draft == {"cpu": 5 / 8, "cuda:1": 3 / 8}
    assert len([size for size in cache_sizes(config, [hybrid]) if size.window is None]) == 2


def test_free_memory_gives_the_shares(monkeypatch: pytest.MonkeyPatch, folders: dict[str, str]) -> None:
    checkpoint = open_checkpoint(Path(folders["llama3"]))
    memory_of(monkeypatch, {"cuda:0": 1.0, "cuda:1": 3.0, "cpu": 9.0})
    assert [len(place.layers) for place in place_model(checkpoint, parse_places("cuda:0,cuda:1"))] == [1, 3]
    halves = parse_places("cuda:1,cuda:1,cuda:0")  # 1.5, 1.5 and 1 GiB
    assert [len(place.layers) for place in place_model(checkpoint, halves)] == [1, 2, 1]
    # Only the first place has the embedding.
    memory_of(monkeypatch, {"cuda:0": checkpoint.weight_bytes("cuda:0") / GIB, "cuda:1": 1e-4})
    assert [len(place.layers) for place in place_model(checkpoint, parse_places("cuda:0,cuda:1"))] == [3, 1]
    with pytest.raises(FastinferError, match="layers on a CPU and on a GPU need shares, such as cuda:0=1,cpu=1"):
        place_model(checkpoint, (Place("cuda:0"), Place("cpu")))


def test_weights_by_device(folders: dict[str, str]) -> None:
    checkpoint = open_checkpoint(Path(folders["qwen3-moe"]))
    places = place_model(checkpoint, parse_places("cpu+cuda:0=3,cuda:1=1"))
    sizes, parts = weight_bytes_by_device(checkpoint, places), checkpoint.part_bytes("cpu")
    experts = sum(size for part, size in parts.items() if part.is_experts)
    assert sizes["cuda:0"] == experts * 3 // 4
    assert sum(sizes.values()) == checkpoint.weight_bytes("cpu")
    assert sizes["cpu"] > parts[None, False]
