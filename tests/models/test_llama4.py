"""Llama 4: where its context ends, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.families import expected, load, make_model, some_tokens
from support.teacher_forcing import log_probabilities

from fastinfer.errors import CheckpointFormatError, FastinferError, RequestError, UnsupportedModelError
from fastinfer.models.config import ModelConfig
from fastinfer.models.hf_config import read_hf_config

KINDS = ["full_attention"] * 5


def read(folder: Path, **changes: Any) -> ModelConfig:
    """The configuration with these changes; ``None`` removes a key."""
    make_model("llama4").config.save_pretrained(folder)
    path = folder / "config.json"
    values = json.loads(path.read_text()) | {"architectures": ["Llama4ForCausalLM"], "layer_types": None} | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    return read_hf_config(path)


@pytest.mark.parametrize(
    ("changes", "length"),
    [
        ({}, 180),
        ({"attention_chunk_size": 230}, 199),
        ({"attention_chunk_size": 230, "attn_temperature_tuning": False}, 230),
        ({"attention_chunk_size": 230, "attn_temperature_tuning": 4}, 199),
        ({"layer_types": KINDS}, 199),
        ({"layer_types": KINDS, "no_rope_layers": [1] * 5}, 256),
        ({"layer_types": KINDS, "floor_scale": 500}, 256),
        ({"attention_chunk_size": 500, "floor_scale": 500}, 256),
    ],
)
def test_the_context_ends_before_attention_changes(changes: dict[str, Any], length: int, tmp_path: Path) -> None:
    config = read(tmp_path, **changes)
    assert config.max_position == length
    config.check_length(length)
    with pytest.raises(RequestError, match=f"expected at most the model's {length} positions, got {length + 1}"):
        config.check_length(length + 1)


def test_the_whole_context_is_that_of_the_model(tmp_path: Path) -> None:
    """The token behind it would see no other in some layers."""
    model, longer = (make_model("llama4", attention_chunk_size=chunk) for chunk in (149, 150))
    model.save_pretrained(tmp_path)
    decoder, reference = load(tmp_path), expected(model, some_tokens())
    assert decoder.config.max_position == len(some_tokens()) - 1 == 149
    got = log_probabilities(decoder, some_tokens()[:149], "float32")
    assert (got - reference[:149]).abs().max() < 1e-4
    assert (expected(longer, some_tokens()) - reference)[149].abs().max() > 0.1


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
        ({"floor_scale": 1}, CheckpointFormatError, "floor_scale: expected 2 to"),
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
