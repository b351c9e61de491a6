"""Granite 4: what its configurations and files say of Mamba-2 layers, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.families import expected, load, make_model, some_tokens
from support.gguf_model_file import write_gguf
from support.teacher_forcing import log_probabilities

from fastinfer.errors import CheckpointFormatError, FastinferError, GGUFFormatError, UnsupportedModelError
from fastinfer.formats.gguf import GGUFFile
from fastinfer.models.gguf_config import read_gguf_config
from fastinfer.models.hf_config import read_hf_config
from fastinfer.models.state_config import Mamba2Config

MAMBA = (True, True, False, True, False, True)
SIZES = Mamba2Config(4, 32, 48, 2, 4)


def changed(folder: Path, family: str = "granite-hybrid", **changes: Any) -> Path:
    """A config.json with these changes; ``None`` removes a key."""
    make_model(family).config.save_pretrained(folder)
    path = folder / "config.json"
    values = json.loads(path.read_text()) | {"architectures": ["GraniteMoeHybridForCausalLM"]} | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    return path


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("family", ["", "-dense", "-biases", "-attention"])
def test_logits(family: str, seed: int, tmp_path: Path) -> None:
    model = make_model(f"granite-hybrid{family}", seed)
    model.save_pretrained(tmp_path)
    got = log_probabilities(load(tmp_path), some_tokens(), "float32")
    assert (got - expected(model, some_tokens())).abs().max() < 1e-4
    assert len(set(got.argmax(-1).tolist())) > 5


def test_logits_with_the_heads_of_published_models(tmp_path: Path) -> None:
    heads = {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_expand": 8, "mamba_n_groups": 1}
    model = make_model("granite-hybrid", **heads)
    model.save_pretrained(tmp_path)
    got = log_probabilities(load(tmp_path), some_tokens(), "float32")
    assert (got - expected(model, some_tokens())).abs().max() < 1e-4


def test_layers_and_sizes(tmp_path: Path) -> None:
    config = read_hf_config(changed(tmp_path))
    assert config.state_layers == MAMBA
    assert config.states == SIZES
    assert config.unrotated_layers == set(range(6))
    assert (config.num_experts, config.intermediate_size, config.shared_intermediate_size) == (4, 96, 80)
    dense = read_hf_config(changed(tmp_path, "granite-hybrid-dense"))
    assert (dense.num_experts, dense.intermediate_size, dense.shared_intermediate_size) == (0, 80, 0)
    biases = read_hf_config(changed(tmp_path, "granite-hybrid-biases"))
    assert biases.states == Mamba2Config(4, 32, 48, 2, 3, False, True, (0.5, 1.5))
    attention = read_hf_config(changed(tmp_path, "granite-hybrid-attention"))
    assert (attention.state_layers, attention.states, attention.unrotated_layers) == ((), None, frozenset())


def test_names_of_published_files(tmp_path: Path) -> None:
    kinds = ["mamba", "mamba", "attention", "mamba", "attention", "mamba"]
    for key in ("layer_types", "layers_block_type"):
        names: dict[str, Any] = {"layer_types": None, key: kinds, "mamba_d_head": "auto", "time_step_limit": None}
        config = read_hf_config(changed(tmp_path, **names, position_embedding_type="nope"))
        assert config.state_layers == MAMBA
        assert config.states == SIZES


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"layer_types": ["mamba"] * 5}, CheckpointFormatError, "expected 6 of linear_attention and full_attention"),
        ({"layer_types": [["mamba"]] * 6}, CheckpointFormatError, "expected 6 of linear_attention and full_attention"),
        ({"layer_types": ["mamba"] * 6}, UnsupportedModelError, "at least one full_attention, got none"),
        ({"mamba_d_state": 24}, UnsupportedModelError, "mamba_d_state must be a multiple of 16 up to 256, got 24"),
        ({"mamba_n_heads": 16, "mamba_d_head": 8}, UnsupportedModelError, "mamba_d_head must be a multiple of 16"),
        ({"mamba_n_groups": 3}, CheckpointFormatError, "mamba_n_heads: expected a multiple of 3, got 4"),
        (
            {"mamba_n_heads": 6},
            CheckpointFormatError,
            r"mamba_expand \* hidden_size: expected a multiple of 6, got 128",
        ),
        ({"mamba_d_head": 64}, CheckpointFormatError, "mamba_d_head: expected 32, got 64"),
        ({"mamba_d_conv": 5}, UnsupportedModelError, "mamba_d_conv must be from 2 to 4, or 7, got 5"),
        ({"mamba_conv_bias": "yes"}, CheckpointFormatError, "mamba_conv_bias"),
        ({"time_step_limit": [0.1]}, CheckpointFormatError, "time_step_limit: expected two numbers in ascending order"),
        ({"time_step_limit": [0.2, 0.1]}, CheckpointFormatError, "time_step_limit: expected two numbers"),
        ({"time_step_limit": [0.1, "a"]}, CheckpointFormatError, "time_step_limit: expected two numbers"),
        ({"hidden_act": "gelu"}, UnsupportedModelError, "hidden_act must be 'silu', got 'gelu'"),
        ({"normalization_function": "layernorm"}, UnsupportedModelError, "normalization_function must be 'rmsnorm'"),
        ({"num_local_experts": -1}, CheckpointFormatError, "num_local_experts"),
        ({"num_local_experts": 0, "shared_intermediate_size": None}, CheckpointFormatError, "shared_intermediate_size"),
        ({"position_embedding_type": "alibi"}, UnsupportedModelError, "position_embedding_type must be nope or rope"),
    ],
)
def test_bad_configurations(changes: dict[str, Any], error: type[FastinferError], message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        read_hf_config(changed(tmp_path, **changes))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("mamba.A_log", lambda values: values[1:].clone()),
        ("mamba.D", lambda values: None),
        ("mamba.dt_bias", lambda values: None),
        ("mamba.conv1d.weight", lambda values: values[:, :, 1:].contiguous()),
        ("mamba.conv1d.bias", lambda values: None),
        ("mamba.norm.weight", lambda values: values[1:].clone()),
        ("mamba.in_proj.weight", lambda values: values[1:].clone()),
        ("mamba.out_proj.weight", lambda values: None),
    ],
)
def test_damaged_tensors(name: str, change: Any, tmp_path: Path) -> None:
    make_model("granite-hybrid").save_pretrained(tmp_path)
    tensors, name = load_file(tmp_path / "model.safetensors"), f"model.layers.1.{name}"
    values = change(tensors.pop(name))
    save_file(tensors if values is None else tensors | {name: values}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointFormatError, match=name.removesuffix(".weight")):
        load(tmp_path)


def test_layers_and_sizes_of_a_gguf_file(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", make_model("granite-hybrid"))
    file = GGUFFile(tmp_path / "model.gguf")
    config = read_gguf_config(file)
    assert config.state_layers == MAMBA
    assert config.states == SIZES
    assert config.unrotated_layers == set(range(6))
    assert (config.num_experts, config.intermediate_size, config.shared_intermediate_size) == (4, 96, 80)
    for key, value, error in (
        ("ssm.state_size", 24, UnsupportedModelError),
        ("ssm.conv_kernel", 5, UnsupportedModelError),
        ("ssm.group_count", 3, GGUFFormatError),
        ("ssm.time_step_rank", 6, GGUFFormatError),
        ("attention.head_count_kv", 2, GGUFFormatError),
    ):
        kept = file.metadata[f"granitehybrid.{key}"]
        file.metadata[f"granitehybrid.{key}"] = value
        with pytest.raises(error, match=r"granitehybrid\.(ssm|attention)"):
            read_gguf_config(file)
        file.metadata[f"granitehybrid.{key}"] = kept


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float16"])
def test_quantised_modes_stay_near(dtype: str, tmp_path: Path) -> None:
    """The decoder of these modes is close to fp32; a swapped part of a projection would be far."""
    model = make_model("granite-hybrid-dense")
    model.save_pretrained(tmp_path)
    reference = expected(model, some_tokens())
    got = log_probabilities(load(tmp_path, dtype), some_tokens(), dtype)
    error = (got.float() - reference).abs().mean()
    assert torch.isfinite(got).all()
    assert error < 0.2 * reference.std()
