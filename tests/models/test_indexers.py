"""Models whose latent attention reads the tokens that an indexer chooses: transformers' logits, and what is refused."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.families import expected, load, make_model, save_model, some_tokens
from support.gguf_model_file import write_gguf
from support.helpers import assert_bitwise
from support.mixed_decoder import CONFIG
from support.teacher_forcing import log_probabilities

from fastinfer.engine.config import EngineConfig
from fastinfer.engine.construction import kv_cache_size
from fastinfer.engine.kv_cache_size import Room
from fastinfer.errors import FastinferError, RequestError, UnsupportedModelError
from fastinfer.formats.gguf import GGUFFile
from fastinfer.models.config import IndexerConfig, LatentAttentionConfig
from fastinfer.models.gguf_config import read_gguf_config
from fastinfer.models.hf_checkpoint import HFCheckpoint
from fastinfer.models.hf_config import read_hf_config
from fastinfer.models.hf_mtp import HFMTPCheckpoint
from fastinfer.models.kv_cache import KVCache
from fastinfer.models.layer_places import possible_ends

FAMILIES = ["deepseek-v3.2", "glm-dsa"]
OWN, SHARED = "full", "shared"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("family", FAMILIES)
def test_logits(family: str, seed: int, tmp_path: Path) -> None:
    model = make_model(family, seed)
    model.save_pretrained(tmp_path)
    got = log_probabilities(load(tmp_path), some_tokens(), "float32")
    assert (got - expected(model, some_tokens())).abs().max() < 1e-4
    assert len(set(got.argmax(-1).tolist())) > 5


@pytest.mark.parametrize("top_k", [1, 8, 65, 149])
@pytest.mark.parametrize("family", FAMILIES)
def test_numbers_of_tokens(family: str, top_k: int, tmp_path: Path) -> None:
    reference = expected(save_model(tmp_path, family, {"index_topk": top_k}), some_tokens())
    got = log_probabilities(load(tmp_path), some_tokens(), "float32")
    assert (got - reference).abs().max() < 1e-4


def test_the_choice_matters_from_the_first_token_that_does_not_read_all(tmp_path: Path) -> None:
    """A token that reads all has the same bits whether its model may choose or not."""
    save_model(tmp_path, "glm-dsa")
    chosen = load(tmp_path)
    (path := tmp_path / "config.json").write_text(json.dumps(json.loads(path.read_text()) | {"index_topk": 256}))
    dense = load(tmp_path)
    found = [log_probabilities(model, some_tokens(), "float32") for model in (chosen, dense)]
    assert_bitwise(found[0][:12], found[1][:12])
    assert ((found[0] - found[1]).abs().amax(-1)[12:] > 1e-3).all()


def test_logits_with_the_heads_of_published_models(tmp_path: Path) -> None:
    heads = {"qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "kv_lora_rank": 512}
    heads |= {"index_n_heads": 32, "index_head_dim": 128, "index_topk": 40}
    model = make_model(
        "glm-dsa", num_hidden_layers=3, initializer_range=0.03, indexer_types=[OWN, OWN, SHARED], **heads
    )
    model.save_pretrained(tmp_path)
    got = log_probabilities(load(tmp_path), some_tokens(), "float32")
    assert (got - expected(model, some_tokens())).abs().max() < 1e-4


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float16, 0.01), (torch.int8, 0.3), (torch.float8_e4m3fn, 0.8)])
def test_other_caches_are_close(dtype: torch.dtype, limit: float, tmp_path: Path) -> None:
    """Rounding may choose other tokens, which these models of few layers and tokens show."""
    save_model(tmp_path, "deepseek-v3.2", {"index_topk": 40})
    decoder, tokens = load(tmp_path), some_tokens()[:60]
    found = [log_probabilities(decoder, tokens, "float32", None, kind) for kind in (torch.float32, dtype)]
    assert 0 < (found[0] - found[1]).abs().mean() < limit


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8, torch.float8_e4m3fn])
def test_a_layer_with_an_indexer_caches_its_keys(dtype: torch.dtype, tmp_path: Path) -> None:
    save_model(tmp_path, "glm-dsa")
    config = HFCheckpoint(tmp_path).config
    options = EngineConfig(num_kv_blocks=7, block_size=16, kv_cache_dtype=dtype)
    cache = KVCache.of_model(config, [7], 16, dtype, "cpu")
    num_bytes = sum(row.shape[1] * 7 for row in cache.rows)
    assert num_bytes == kv_cache_size(options, [config]).num_bytes
    is_quantized = dtype.itemsize == 1
    key_bytes = 20 * (2 if is_quantized else dtype.itemsize)
    assert num_bytes == 7 * 16 * (5 * (48 * dtype.itemsize + 4 * is_quantized) + 3 * key_bytes)


def changed(folder: Path, family: str, **changes: Any) -> Path:
    """A config.json with these changes; ``None`` removes a key."""
    make_model(family).save_pretrained(folder)
    path = folder / "config.json"
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    return path


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, (0, 1, 1, 1, 4)),
        ({"indexer_types": None}, (0, 1, 2, 3, 4)),
        ({"indexer_types": None, "index_topk_pattern": "FSFSS"}, (0, 0, 2, 2, 2)),
        ({"indexer_types": None, "index_topk_pattern": [OWN, SHARED, OWN, OWN, OWN]}, (0, 0, 2, 3, 4)),
        ({"indexer_types": None, "index_topk_freq": 3}, (0, 1, 1, 1, 4)),
        ({"indexer_types": None, "index_topk_freq": 2, "index_skip_topk_offset": 3}, (0, 1, 2, 2, 4)),
        ({"indexer_types": None, "index_topk_freq": 0}, (0, 1, 2, 3, 4)),
    ],
)
def test_layers_that_share_an_indexer(changes: dict[str, Any], layers: tuple[int, ...], tmp_path: Path) -> None:
    config = read_hf_config(changed(tmp_path, "glm-dsa", **changes))
    assert config.indexer == IndexerConfig(24, 20, 12, interleaved_rope=True, layers=layers)
    # Neither a device nor a stage begins between them.
    assert possible_ends(config) == [end for end in range(1, 6) if end == 5 or layers[end] == end]


REFUSED = [
    ("deepseek-v3.2", {"q_lora_rank": None}, "q_lora_rank must be a size, which indexers need, got null"),
    ("deepseek-v3.2", {"index_head_dim": 7}, "index_head_dim: expected 8 to"),
    ("deepseek-v3.2", {"index_topk": 0}, "index_topk: expected 1 to"),
    ("deepseek-v3.2", {"index_n_heads": "many"}, "index_n_heads: expected int"),
    ("deepseek-v3.2", {"layer_types": ["full_attention"] * 4}, "layer_types must all be indexed_attention, got"),
    ("deepseek-v3.2", {"rope_interleave": False}, "rope_interleave must be True, got False"),
    ("deepseek-v3.2", {"indexer_rope_interleave": True}, "indexer_rope_interleave must be False, got True"),
    ("deepseek-v3.2", {"attention_bias": True}, "attention_bias must be False, got True"),
    ("deepseek-v3.2", {"mlp_bias": True}, "mlp_bias must be False, got True"),
    ("glm-dsa", {"indexer_rope_interleave": False}, "indexer_rope_interleave must be True, got False"),
    ("glm-dsa", {"indexer_types": [OWN] * 4}, "indexer_types: expected 5 of full and shared, full first, got"),
    ("glm-dsa", {"indexer_types": [SHARED] * 5}, "indexer_types: expected 5 of full and shared, full first, got"),
    ("glm-dsa", {"indexer_types": None, "index_topk_pattern": "FSXFF"}, "index_topk_pattern: expected 5 of full"),
    ("glm-dsa", {"indexer_types": None, "index_topk_pattern": 3}, "index_topk_pattern: expected 5 of full"),
    (
        "glm-dsa",
        {"indexer_types": None, "index_topk_freq": 3, "index_skip_topk_offset": 0},
        "index_topk_freq: expected 5 of full and shared, full first",
    ),
]


@pytest.mark.parametrize(("family", "changes", "message"), REFUSED)
def test_configurations_that_are_refused(family: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = changed(tmp_path, family, **changes)
    with pytest.raises(FastinferError, match=message) as caught:
        read_hf_config(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("wq_b.weight", (480, 55)),
        ("wk.weight", (20, 95)),
        ("weights_proj.weight", (23, 96)),
        ("k_norm.weight", (19,)),
        ("k_norm.bias", (21,)),
    ],
)
def test_tensors_of_another_shape_are_named(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    save_model(tmp_path, "deepseek-v3.2")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    assert f"model.layers.1.self_attn.indexer.{name}" in tensors
    tensors[f"model.layers.1.self_attn.indexer.{name}"] = torch.zeros(shape)
    save_file(tensors, file)
    place = re.escape(f"model.layers.1.self_attn.indexer.{name.removesuffix('.weight')}")
    with pytest.raises(FastinferError, match=f"{place}.* must have the shape"):
        load(tmp_path)


@pytest.mark.parametrize(("head_dim", "is_taken"), [(64, True), (128, True), (20, False), (136, False)])
def test_heads_that_gpus_take(head_dim: int, is_taken: bool) -> None:
    options, room = EngineConfig(device="cuda", num_kv_blocks=8, kv_cache_dtype=torch.bfloat16), Room(2**30, 2**30)
    sizes = LatentAttentionConfig(96, 256, 64, 64, 64)
    indexer = IndexerConfig(3, head_dim, 20, interleaved_rope=False, layers=(0, 0, 0))
    config = replace(CONFIG, num_kv_heads=1, head_dim=320, latent_attention=sizes, indexer=indexer)
    if is_taken:
        assert kv_cache_size(options, [config], room).num_blocks == (8,)
        return
    message = (
        f"on device 'cuda' the heads of indexers must have a multiple of 8 and at most 128 elements, got {head_dim}"
    )
    with pytest.raises(RequestError, match=message):
        kv_cache_size(options, [config], room)


def gguf_file(folder: Path, **changes: Any) -> GGUFFile:
    """The metadata of a GGUF file with these changes of keys of attention; ``None`` removes one."""
    write_gguf(folder / "model.gguf", make_model("glm-dsa"))
    file = GGUFFile(folder / "model.gguf")
    for key, value in changes.items():
        file.metadata[name := f"glm-dsa.attention.{key}"] = value
        if value is None:
            del file.metadata[name]
    return file


def test_gguf_layers_that_share_an_indexer(tmp_path: Path) -> None:
    """In files that do not say it, the tensors do; there may be a value for a layer for multi-token prediction, too."""
    for types in ([True, True, False, False, True], None):
        array = None if types is None else np.array(types)
        config = read_gguf_config(gguf_file(tmp_path, **{"indexer.types": array}))
        assert config.indexer == IndexerConfig(24, 20, 12, interleaved_rope=True, layers=(0, 1, 1, 1, 4))
    file = gguf_file(tmp_path, **{"indexer.types": np.array([True] * 5)})
    file.metadata["glm-dsa.nextn_predict_layers"] = 1
    config = read_gguf_config(file)
    assert config.indexer is not None
    assert config.indexer.layers == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q_lora_rank": None}, "glm-dsa.attention.q_lora_rank is missing, which indexers need"),
        ({"indexer.top_k": None}, "glm-dsa.attention.indexer.top_k"),
        ({"indexer.head_count": 0}, "glm-dsa.attention.indexer.head_count': expected 1 to"),
        ({"indexer.key_length": 7}, "glm-dsa.attention.indexer.key_length': expected 8 to"),
        ({"indexer.types": np.array([True] * 4)}, "glm-dsa.attention.indexer.types: expected 5 values"),
        ({"indexer.types": np.array([False] * 5)}, "expected an indexer in the first layer, got none"),
        ({"indexer.types": True}, "glm-dsa.attention.indexer.types': expected ndarray"),
    ],
)
def test_gguf_files_that_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(FastinferError, match=message) as caught:
        read_gguf_config(gguf_file(tmp_path, **changes))
    assert "\n" not in str(caught.value)


def test_layers_for_multi_token_prediction_are_refused(tmp_path: Path) -> None:
    save_model(tmp_path, "deepseek-v3.2")
    message = "layers for multi-token prediction are not implemented for DeepseekV32ForCausalLM"
    with pytest.raises(UnsupportedModelError, match=message):
        HFMTPCheckpoint(tmp_path)
