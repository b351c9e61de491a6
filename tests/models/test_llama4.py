"""Llama 4: chunks of the text, growing queries, experts, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.families import expected, load, make_model, save_model, some_tokens
from support.gguf_model_file import write_gguf
from support.teacher_forcing import log_probabilities

from fastinfer.errors import CheckpointFormatError, FastinferError, UnsupportedModelError
from fastinfer.formats.gguf import GGUFFile
from fastinfer.models.config import ModelConfig
from fastinfer.models.gguf_config import read_gguf_config
from fastinfer.models.hf_checkpoint import HFCheckpoint
from fastinfer.models.hf_config import read_hf_config

KINDS = ["full_attention"] * 5


def read(folder: Path, **changes: Any) -> ModelConfig:
    """The configuration with these changes; ``None`` removes a key."""
    make_model("llama4").config.save_pretrained(folder)
    path = folder / "config.json"
    values = json.loads(path.read_text()) | {"architectures": ["Llama4ForCausalLM"], "layer_types": None} | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    return read_hf_config(path)


@pytest.mark.parametrize("chunk", [1, 7, 64, 149, 150, 500])
def test_the_text_is_cut_into_chunks(chunk: int, tmp_path: Path) -> None:
    """Chunks end within the text, at its end and behind it."""
    model = make_model("llama4", attention_chunk_size=chunk)
    model.save_pretrained(tmp_path)
    reference = expected(model, some_tokens())
    got = log_probabilities(load(tmp_path), some_tokens(), "float32")
    assert (got - reference).abs().max() < 1e-4
    longer = expected(make_model("llama4", attention_chunk_size=chunk + 1), some_tokens())
    changed = (longer - reference).abs().amax(-1) > 0.1
    assert not changed[:chunk].any()
    assert changed[chunk:].any() == (chunk < len(some_tokens()))


@pytest.mark.parametrize("changes", [{"floor_scale": 1}, {"floor_scale": 150}, {"attn_scale": 2.0, "floor_scale": 77}])
def test_queries_grow_without_rotation(changes: dict[str, Any], tmp_path: Path) -> None:
    """Also from the first position on, and at the last one alone."""
    model = make_model("llama4", **changes)
    model.save_pretrained(tmp_path)
    reference = expected(model, some_tokens())
    assert (log_probabilities(load(tmp_path), some_tokens(), "float32") - reference).abs().max() < 1e-4
    plain = expected(make_model("llama4", **changes, attn_temperature_tuning=False), some_tokens())
    assert (plain - reference).abs().amax(-1).gt(1e-3).nonzero()[0] >= changes["floor_scale"] - 1
    assert (plain - reference)[-1].abs().max() > 1e-3


def test_windows_and_growth(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert (config.windows, config.chunked_windows) == ((40, 40, 0, 40, 40), True)
    assert [config.has_growing_queries(layer) for layer in range(5)] == [False, False, True, False, False]
    assert (config.query_growth, config.query_length, config.query_offset) == (0.3, 30, 1)
    assert config.max_position == 256
    config = read(tmp_path, layer_types=KINDS, attn_temperature_tuning=False)
    assert (config.windows, config.chunked_windows, config.query_growth) == ((), False, 0.0)
    assert read(tmp_path, attn_temperature_tuning=4).query_growth == 0.3


def test_layers(tmp_path: Path) -> None:
    config = read(tmp_path, no_rope_layers=[])
    assert config.unrotated_layers == config.unnormed_layers == {2}
    assert (config.dense_layers, config.dense_intermediate_size) == ({0, 2, 4}, 80)
    assert (config.intermediate_size, config.shared_intermediate_size) == (96, 96)
    assert read(tmp_path, use_qk_norm=False).qk_norm == "none"
    assert read(tmp_path, moe_layers=[1, 4]).dense_layers == {0, 2, 3}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"num_experts_per_tok": 2}, UnsupportedModelError, "num_experts_per_tok must be 1, got 2"),
        ({"layer_types": ["full_attention"] * 4}, CheckpointFormatError, "expected 5 of chunked_attention and full_"),
        (
            {"layer_types": ["sliding_attention"] * 5},
            CheckpointFormatError,
            "expected 5 of chunked_attention and full_",
        ),
        ({"attention_chunk_size": 0}, CheckpointFormatError, "attention_chunk_size: expected 1 to"),
        ({"floor_scale": 0}, CheckpointFormatError, "floor_scale: expected 1 to"),
        ({"attn_scale": -1.0}, CheckpointFormatError, "attn_scale: expected"),
        ({"no_rope_layers": [1, 0]}, CheckpointFormatError, "no_rope_layers: expected 5 numbers"),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
            UnsupportedModelError,
            "rotary scaling 'yarn' is not implemented with use_qk_norm",
        ),
    ],
)
def test_bad_configurations(changes: dict[str, Any], error: type[FastinferError], message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        read(tmp_path, **changes)


def test_an_expert_gets_its_input_times_the_weight(tmp_path: Path) -> None:
    """Which is not its output times the weight."""
    model = make_model("llama4-plain", num_hidden_layers=2, no_rope_layers=None, moe_layers=[0, 1])
    model.save_pretrained(tmp_path)
    decoder = load(tmp_path)
    mixture: Any = decoder.layers[1].mlp
    x = torch.randn(7, 64)
    residual = torch.zeros(7, 64)
    out = mixture(x, residual, None)
    normed = mixture.norm(x)
    with torch.inference_mode():
        reference, _ = model.model.layers[1].feed_forward(normed[None])
    assert (out - reference).abs().max() < 1e-5


@pytest.mark.parametrize("num_experts", [6, 128])
def test_gguf_files_have_the_published_settings(num_experts: int, tmp_path: Path) -> None:
    """They do not say them; Maverick, with 128 experts, does not normalise queries and keys."""
    sizes = {"num_local_experts": num_experts, "use_qk_norm": num_experts != 128}
    write_gguf(tmp_path / "model.gguf", save_model(tmp_path, "llama4-published", sizes))
    config, other = read_gguf_config(GGUFFile(tmp_path / "model.gguf")), HFCheckpoint(tmp_path).config
    assert config.windows == (8192, 8192, 8192, 0, 8192)
    names = ("windows", "chunked_windows", "query_growth", "query_length", "query_offset", "growing_layers")
    names += ("qk_norm", "unnormed_layers", "unrotated_layers", "router", "dense_layers", "shared_intermediate_size")
    for name in names:
        assert getattr(config, name) == getattr(other, name), name


def test_gguf_files_that_are_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", make_model("llama4-published"))
    for key, value, got in (("expert_used_count", 2, 2), ("expert_count", 0, 0)):
        file = GGUFFile(tmp_path / "model.gguf")
        file.metadata[f"llama4.{key}"] = value
        with pytest.raises(UnsupportedModelError, match=f"llama4.expert_used_count must be 1, got {got}"):
            read_gguf_config(file)
