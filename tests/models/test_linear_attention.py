"""Models with layers of linear attention: the logits of transformers, and what is refused."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.families import FAMILIES, SIZES, load, make_model, some_tokens
from support.mixed_decoder import CONFIG
from support.random_checkpoint import RandomCheckpoint, int8
from support.teacher_forcing import log_probabilities
from torch import Tensor

from fastinfer.errors import CheckpointFormatError, FastinferError, UnsupportedModelError
from fastinfer.formats.unpacked import Dense, Unpacked
from fastinfer.models.config import Precision
from fastinfer.models.hf_checkpoint import HFCheckpoint
from fastinfer.models.hf_config import read_hf_config
from fastinfer.models.loader import load_decoder
from fastinfer.models.state_config import LinearAttentionConfig

LINEAR_FAMILIES = ["qwen3.5", "qwen3.5-few", "qwen3.5-moe", "qwen3-next", "qwen3-next-plain"]
LINEAR_FAMILIES += ["olmo-hybrid", "olmo-hybrid-plain", "kimi-linear", "kimi-linear-groups"]
LINEAR_FAMILIES += ["bailing-hybrid", "bailing-hybrid-other"]


def expected_logits(model: Any) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(input_ids=torch.tensor([some_tokens()])).logits[0]
    return logits.log_softmax(-1)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("family", LINEAR_FAMILIES)
def test_logits(family: str, seed: int, tmp_path: Path) -> None:
    model = make_model(family, seed)
    model.save_pretrained(tmp_path)
    got = log_probabilities(load(tmp_path), some_tokens(), "float32")
    assert (got - expected_logits(model)).abs().max() < 1e-4
    assert len(set(got.argmax(-1).tolist())) > 5


def test_logits_with_the_heads_of_published_models(tmp_path: Path) -> None:
    heads = {"head_dim": 256, "linear_num_key_heads": 4, "linear_num_value_heads": 8}
    dims = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    model = make_model("qwen3.5", num_hidden_layers=4, **heads, **dims)
    model.save_pretrained(tmp_path)
    assert HFCheckpoint(tmp_path).config.rotary_dim == 64
    got = log_probabilities(load(tmp_path), some_tokens(), "float32")
    assert (got - expected_logits(model)).abs().max() < 1e-4


def test_the_language_model_within_one_of_text_and_images(tmp_path: Path) -> None:
    text = {**SIZES, **FAMILIES["qwen3.5"][1], "model_type": "qwen3_5_text"}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    config = transformers.Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=True)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.Qwen3_5ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path)
    assert any(name.startswith("model.language_model.layers.") for name in tensors_of(tmp_path))
    got = log_probabilities(load(tmp_path), some_tokens(), "float32")
    assert (got - expected_logits(model)).abs().max() < 1e-4


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def test_sizes(tmp_path: Path) -> None:
    make_model("qwen3.5").save_pretrained(tmp_path)
    config = HFCheckpoint(tmp_path).config
    assert config.states == LinearAttentionConfig(2, 6, 16, 48, 4)
    assert config.state_layers == (True, True, True, False) * 2
    assert (config.rotary_dim, config.output_gate, config.windows) == (8, True, ())


def changed(folder: Path, **changes: Any) -> Path:
    """A config.json with these changes; ``None`` removes a key."""
    make_model("qwen3.5").config.save_pretrained(folder)
    path = folder / "config.json"
    values = json.loads(path.read_text()) | {"architectures": ["Qwen3_5ForCausalLM"]} | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    return path


def test_names_in_published_files_of_olmo_hybrid(tmp_path: Path) -> None:
    """transformers cuts the filters into three equal parts, and gives norms behind attention another name."""
    model = make_model("olmo-hybrid")
    model.save_pretrained(tmp_path)
    tensors, published = tensors_of(tmp_path), {}
    for name, values in model.state_dict().items():
        if name.endswith("conv1d.weight"):
            for part, rows in zip("qkv", values.split([64, 64, 288]), strict=True):
                published[name.replace("conv1d", f"{part}_conv1d")] = rows.contiguous()
        elif name.startswith(("model.layers.2.", "model.layers.4.")):  # with attention
            published[name] = values
        else:
            name = name.replace("input_layernorm", "attention_layer_norm")
            published[name.replace("post_attention_layernorm", "feedforward_layer_norm")] = values
    assert published.keys() != tensors.keys()
    save_file(published, tmp_path / "model.safetensors")
    got = log_probabilities(load(tmp_path), some_tokens(), "float32")
    assert (got - expected_logits(model)).abs().max() < 1e-4
    save_file(dict(model.state_dict()), tmp_path / "model.safetensors")
    assert torch.equal(log_probabilities(load(tmp_path), some_tokens(), "float32"), got)


# What is quantised: projections that fit each other, but not that of the gates, and such that do not.
@pytest.mark.parametrize(
    "quantized", ["in_proj_[qkv]|in_proj_z", "in_proj_[qkv]", "in_proj_z", "in_proj_k", "in_proj_v"]
)
def test_projections_of_different_forms(quantized: str) -> None:
    sizes = LinearAttentionConfig(2, 4, 16, 32, 4, separate_projections=True, beta_scale=2.0)
    config = replace(CONFIG, num_layers=2, vocab_size=320, max_position=256, state_layers=(True, False), states=sizes)

    def form(name: str, values: Tensor) -> Unpacked:
        return int8(values) if re.search(quantized, name) else Dense(values)

    def rounded(name: str, values: Tensor) -> Dense:
        return Dense(form(name, values).dequantize())

    got, expected = (
        log_probabilities(
            load_decoder(RandomCheckpoint(config, each), Precision.of("float32"), None), some_tokens(), "float32"
        )
        for each in (form, rounded)
    )
    assert (got - expected).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("settings", "is_rotated"),
    [
        ({"rope_theta": None}, False),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": None}, "rope_theta": 1e4}, False),
        ({"rope_parameters": {"rope_type": "default"}}, True),
        ({"rope_parameters": None}, True),
        ({"rope_theta": 5e5}, True),
    ],
)
def test_rotations_of_olmo_hybrid(settings: dict[str, Any], is_rotated: bool, tmp_path: Path) -> None:
    """The published models have none."""
    values = make_model("olmo-hybrid").config.to_dict()
    del values["rope_parameters"]
    (tmp_path / "config.json").write_text(
        json.dumps({**values, "architectures": ["OlmoHybridForCausalLM"], **settings})
    )
    expected = transformers.OlmoHybridForCausalLM(transformers.OlmoHybridConfig.from_dict({**values, **settings}))
    assert (expected.model.rotary_emb is not None) == is_rotated
    assert (read_hf_config(tmp_path / "config.json").unrotated_layers == frozenset()) == is_rotated


def test_sizes_of_olmo_hybrid_that_follow_from_others(tmp_path: Path) -> None:
    config = transformers.OlmoHybridConfig()
    values = {key: value for key, value in config.to_dict().items() if not key.startswith("linear_")}
    (tmp_path / "config.json").write_text(json.dumps({**values, "architectures": ["OlmoHybridForCausalLM"]}))
    states = read_hf_config(tmp_path / "config.json").states
    expected = LinearAttentionConfig(30, 30, 96, 192, 4, separate_projections=True, beta_scale=2.0, norm_eps=1e-5)
    assert states == expected


def test_layers_that_are_not_listed(tmp_path: Path) -> None:
    assert read_hf_config(changed(tmp_path, layer_types=None)).state_layers == (True, True, True, False) * 2
    config = read_hf_config(changed(tmp_path, layer_types=None, full_attention_interval=3))
    assert config.state_layers == (True, True, False, True, True, False, True, True)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"layer_types": ["linear_attention"] * 7}, CheckpointFormatError, "expected 8 of linear_attention and"),
        ({"layer_types": ["sliding_attention"] * 8}, CheckpointFormatError, "expected 8 of linear_attention and"),
        ({"layer_types": [["linear_attention"]] * 8}, CheckpointFormatError, "expected 8 of linear_attention and"),
        ({"layer_types": ["linear_attention"] * 8}, UnsupportedModelError, "at least one full_attention, got none"),
        ({"layer_types": ["full_attention"] * 8}, UnsupportedModelError, "at least one linear_attention, got none"),
        ({"linear_num_value_heads": 5}, CheckpointFormatError, "a multiple of 2, got 5"),
        ({"linear_num_key_heads": 0}, CheckpointFormatError, "linear_num_key_heads"),
        ({"linear_key_head_dim": 24}, UnsupportedModelError, "a multiple of 16 up to 256, got 24"),
        ({"linear_value_head_dim": 272}, UnsupportedModelError, "a multiple of 16 up to 256, got 272"),
        ({"linear_conv_kernel_dim": 5}, UnsupportedModelError, "from 2 to 4, or 7, got 5"),
        ({"linear_conv_kernel_dim": "4"}, CheckpointFormatError, "linear_conv_kernel_dim"),
        ({"hidden_act": "gelu"}, UnsupportedModelError, "hidden_act must be 'silu', got 'gelu'"),
        ({"attn_output_gate": False}, UnsupportedModelError, "attn_output_gate must be True, got False"),
    ],
)
def test_bad_configurations(changes: dict[str, Any], error: type[FastinferError], message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        read_hf_config(changed(tmp_path, **changes))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("linear_attn.A_log", lambda values: values[1:]),
        ("linear_attn.dt_bias", lambda values: None),
        ("linear_attn.conv1d.weight", lambda values: values[:, :, 1:].contiguous()),
        ("linear_attn.conv1d.weight", lambda values: values.expand(-1, 2, -1).contiguous()),
        ("linear_attn.norm.weight", lambda values: values[1:]),
        ("linear_attn.in_proj_z.weight", lambda values: values[1:]),
        ("linear_attn.in_proj_a.weight", lambda values: values[:, 1:].contiguous()),
        ("linear_attn.out_proj.weight", lambda values: None),
    ],
)
def test_damaged_tensors(name: str, change: Any, tmp_path: Path) -> None:
    make_model("qwen3.5").save_pretrained(tmp_path)
    tensors, name = tensors_of(tmp_path), f"model.layers.1.{name}"
    values = change(tensors.pop(name))
    save_file(tensors if values is None else tensors | {name: values}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointFormatError, match=name.removesuffix(".weight")):
        load(tmp_path)
