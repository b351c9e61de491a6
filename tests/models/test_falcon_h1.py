"""Falcon-H1: Mamba-2 beside attention, its factors, what its configurations and files say, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.families import FALCON_H1, expected, load, make_model, some_tokens
from support.gguf_model_file import write_gguf
from support.teacher_forcing import log_probabilities

from fastinfer.cli.memory_bounds import Weights
from fastinfer.errors import CheckpointFormatError, FastinferError, GGUFFormatError, UnsupportedModelError
from fastinfer.formats.gguf import GGUFFile
from fastinfer.models.config import ModelConfig, Precision
from fastinfer.models.gguf_checkpoint import GGUFCheckpoint
from fastinfer.models.gguf_config import read_gguf_config
from fastinfer.models.hf_checkpoint import HFCheckpoint
from fastinfer.models.hf_config import read_hf_config
from fastinfer.models.loader import load_decoder
from fastinfer.models.state_config import Mamba2Config

FACTORS = {key: value for key, value in FALCON_H1.items() if "multiplier" in key}
# Far from 1, and far from each other.
SMALL_FACTORS = {
    "embedding_multiplier": 5.6,
    "lm_head_multiplier": 0.02,
    "key_multiplier": 0.01,
    "attention_out_multiplier": 0.04,
    "ssm_multipliers": [0.35, 0.25, 0.03, 0.5, 0.35],
    "mlp_multipliers": [0.18, 0.04],
}


def changed(folder: Path, family: str = "falcon-h1", **changes: Any) -> Path:
    """A config.json with these changes."""
    make_model(family).config.save_pretrained(folder)
    path = folder / "config.json"
    values = json.loads(path.read_text()) | {"architectures": ["FalconH1ForCausalLM"]} | changes
    path.write_text(json.dumps(values))
    return path


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("falcon-h1", {}),
        ("falcon-h1-norm", {}),
        ("falcon-h1-plain", {}),
        ("falcon-h1", SMALL_FACTORS),
        ("falcon-h1-norm", SMALL_FACTORS),
        # The heads of published models.
        ("falcon-h1", {"mamba_d_ssm": 256, "mamba_n_heads": 4, "mamba_d_head": 64, "mamba_d_state": 256}),
    ],
)
def test_logits(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    for seed in range(2):
        model = make_model(family, seed, **changes)
        model.save_pretrained(tmp_path)
        got = log_probabilities(load(tmp_path), some_tokens(), "float32")
        assert (got - expected(model, some_tokens())).abs().max() < 1e-4
        assert len(set(got.argmax(-1).tolist())) > 5


@pytest.mark.parametrize("family", ["falcon-h1", "falcon-h1-norm"])
def test_logits_of_a_gguf_file(family: str, tmp_path: Path) -> None:
    """Its matrices have their factors already."""
    model = make_model(family)
    write_gguf(tmp_path / "model.gguf", model)
    checkpoint = GGUFCheckpoint(GGUFFile(tmp_path / "model.gguf"), exact=True)
    got = log_probabilities(load_decoder(checkpoint, Precision.of("float32"), None), some_tokens(), "float32")
    assert (got - expected(model, some_tokens())).abs().max() < 1e-4


@pytest.mark.parametrize("key", FACTORS)
def test_every_factor_matters(key: str, tmp_path: Path) -> None:
    """The comparisons with transformers would show a factor in the wrong place."""
    model = make_model("falcon-h1")
    model.save_pretrained(tmp_path)
    reference = expected(model, some_tokens())
    path = tmp_path / "config.json"
    text, value = path.read_text(), FACTORS[key]
    values = [value] if isinstance(value, float) else value
    for index in range(len(values)):
        factors = [factor * (1.5 if index == number else 1.0) for number, factor in enumerate(values)]
        other = factors[0] if isinstance(value, float) else factors
        path.write_text(json.dumps(json.loads(text) | {key: other}))
        got = log_probabilities(load(tmp_path), some_tokens(), "float32")
        assert (got - reference).abs().max() > 1e-3


def test_layers_and_sizes(tmp_path: Path) -> None:
    config = read_hf_config(changed(tmp_path))
    assert config.stored_layers == ((0, None), (0, 0), (1, None), (1, 1), (2, None), (2, 2))
    assert (config.num_layers, config.num_stored_layers) == (6, 3)
    assert config.state_layers == (True, False) * 3
    assert [config.is_parallel(layer) for layer in range(6)] == [False, True] * 3
    assert [config.has_mlp(layer) for layer in range(6)] == [False, True] * 3
    assert config.unrotated_layers == frozenset()
    states = config.states
    assert isinstance(states, Mamba2Config)
    assert (states.num_heads, states.head_dim, states.state_dim, states.num_groups) == (6, 16, 48, 2)
    assert (states.kernel_size, states.conv_bias, states.has_norm) == (4, True, False)
    plain = read_hf_config(changed(tmp_path, "falcon-h1-plain"))
    assert plain.states == Mamba2Config(4, 32, 48, 2, 4, dt_limits=(0.5, 1.5), has_norm=False)
    assert (plain.residual_scale, plain.mlp_input_scale, plain.attention_input_scale) == (1.0, 1.0, 1.0)
    assert plain.attention_scale == 32**-0.5


def test_layers_and_sizes_of_a_gguf_file(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", make_model("falcon-h1"))
    file = GGUFFile(tmp_path / "model.gguf")
    assert "blk.0.ffn_norm" in file.tensors  # without ".weight", as the usual converter writes it
    config = read_gguf_config(file)
    assert config.stored_layers == ((0, None), (0, 0), (1, None), (1, 1), (2, None), (2, 2))
    assert config.state_layers == (True, False) * 3
    assert config.states == Mamba2Config(6, 16, 48, 2, 4, has_norm=False)
    for key, value, error in (
        ("ssm.state_size", 24, UnsupportedModelError),
        ("ssm.group_count", 4, GGUFFormatError),
        ("ssm.inner_size", 100, GGUFFormatError),
        ("attention.head_count_kv", 3, GGUFFormatError),
        ("block_count", 2**20, GGUFFormatError),
    ):
        kept = file.metadata[f"falcon-h1.{key}"]
        file.metadata[f"falcon-h1.{key}"] = value
        with pytest.raises(error, match=r"ssm|query heads|block_count") as caught:
            read_gguf_config(file)
        assert "\n" not in str(caught.value)
        file.metadata[f"falcon-h1.{key}"] = kept


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"attention_bias": True}, UnsupportedModelError, "attention_bias must be False, got True"),
        ({"mlp_bias": True}, UnsupportedModelError, "mlp_bias must be False, got True"),
        ({"projectors_bias": True}, UnsupportedModelError, "projectors_bias must be False, got True"),
        ({"mamba_proj_bias": True}, UnsupportedModelError, "mamba_proj_bias must be False, got True"),
        ({"hidden_act": "gelu"}, UnsupportedModelError, "hidden_act must be 'silu', got 'gelu'"),
        (
            {"mamba_rms_norm": True, "mamba_norm_before_gate": True},
            UnsupportedModelError,
            "mamba_norm_before_gate must be False, got True",
        ),
        ({"mamba_d_state": 24}, UnsupportedModelError, "mamba_d_state must be a multiple of 16 up to 256, got 24"),
        ({"mamba_d_conv": 5}, UnsupportedModelError, "mamba_d_conv must be from 2 to 4, or 7, got 5"),
        ({"mamba_n_groups": 4}, CheckpointFormatError, "mamba_n_heads: expected a multiple of 4, got 6"),
        ({"mamba_d_ssm": 100}, CheckpointFormatError, "mamba_d_ssm: expected a multiple of 6, got 100"),
        ({"mamba_d_head": 32}, CheckpointFormatError, "mamba_d_head: expected 16, got 32"),
        ({"mamba_rms_norm": 1}, CheckpointFormatError, "mamba_rms_norm: expected bool, got 1"),
        ({"key_multiplier": 0.0}, CheckpointFormatError, "key_multiplier: expected 1e-06 to"),
        ({"embedding_multiplier": "5"}, CheckpointFormatError, "embedding_multiplier: expected float, got '5'"),
        ({"mlp_multipliers": [1.0]}, CheckpointFormatError, "mlp_multipliers: expected 2 numbers"),
        ({"mlp_multipliers": [0.0, 1.0]}, CheckpointFormatError, "mlp_multipliers: expected numbers from 1e-06"),
        ({"ssm_multipliers": [1.0] * 4}, CheckpointFormatError, "ssm_multipliers: expected 5 numbers"),
        ({"ssm_multipliers": 2.0}, CheckpointFormatError, "ssm_multipliers: expected list, got 2.0"),
        ({"num_hidden_layers": 0}, CheckpointFormatError, "num_hidden_layers: expected 1 to"),
        ({"num_hidden_layers": 2**20}, CheckpointFormatError, "num_hidden_layers: expected 1 to 65536"),
        ({"time_step_limit": [0.2, 0.1]}, CheckpointFormatError, "time_step_limit: expected two numbers"),
    ],
)
def test_bad_configurations(changes: dict[str, Any], error: type[FastinferError], message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message) as caught:
        read_hf_config(changed(tmp_path, **changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["input_layernorm", "pre_ff_layernorm", "mamba.D", "mamba.norm", "self_attn.k_proj", "feed_forward.up_proj"]
)
def test_missing_tensors(name: str, tmp_path: Path) -> None:
    make_model("falcon-h1-norm").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {key: value for key, value in tensors.items() if f"layers.1.{name}." not in f"{key}."}
    assert len(kept) < len(tensors)
    save_file(kept, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointFormatError, match=rf"layers.1.{name}.*missing"):
        load(tmp_path)


def test_missing_norm_of_a_gguf_file(tmp_path: Path) -> None:
    """It may be missing in all layers, but not in some."""
    write_gguf(tmp_path / "model.gguf", make_model("falcon-h1-norm"))
    file = GGUFFile(tmp_path / "model.gguf")
    del file.tensors["blk.1.ssm_norm.weight"]
    with pytest.raises(GGUFFormatError, match=r"blk\.1\.ssm_norm\.weight' is missing"):
        load_decoder(GGUFCheckpoint(file), Precision.of("float32"), None)


def test_memory(tmp_path: Path) -> None:
    model = make_model("falcon-h1")
    model.save_pretrained(tmp_path)
    write_gguf(tmp_path / "model.gguf", model)
    folder, file = HFCheckpoint(tmp_path), GGUFCheckpoint(GGUFFile(tmp_path / "model.gguf"))
    total = sum(folder.tensors.num_bytes(name) for name in folder.tensors.names)
    assert folder.weight_bytes("cpu") == total
    for checkpoint in (folder, file):
        tables = _table_bytes(checkpoint.config)
        assert abs(Weights.of(checkpoint).memory_bytes - tables - total) < 0.02 * total


def _table_bytes(config: ModelConfig) -> int:
    return config.max_position * config.rotary_dim * 4


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float16"])
def test_quantised_modes_stay_near(dtype: str, tmp_path: Path) -> None:
    """The decoder of these modes is close to fp32; a swapped part of a projection would be far."""
    model = make_model("falcon-h1", **SMALL_FACTORS)
    model.save_pretrained(tmp_path)
    reference = expected(model, some_tokens())
    got = log_probabilities(load(tmp_path, dtype), some_tokens(), dtype)
    error = (got.float() - reference).abs().mean()
    assert torch.isfinite(got).all()
    assert error < 0.2 * reference.std()
