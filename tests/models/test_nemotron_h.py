"""Nemotron-H: layers of one part each, what its configurations say of them, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from safetensors.torch import load_file, save_file
from support.families import expected, load, make_model, some_tokens
from support.gguf_model_file import write_gguf
from support.teacher_forcing import log_probabilities

from fastinfer.cli.memory_bounds import Weights
from fastinfer.errors import CheckpointFormatError, FastinferError, GGUFFormatError, UnsupportedModelError
from fastinfer.formats.gguf import GGUFFile
from fastinfer.models.config import Precision
from fastinfer.models.gguf_checkpoint import GGUFCheckpoint
from fastinfer.models.gguf_config import read_gguf_config
from fastinfer.models.hf_checkpoint import HFCheckpoint
from fastinfer.models.hf_config import read_hf_config
from fastinfer.models.loader import load_decoder
from fastinfer.models.state_config import Mamba2Config

PATTERN = "M-ME*EMM-*-M"
LAYERS = ((0, 1), (2, 3), (4, 5), (6, None), (7, 8), (9, 10), (11, None))


def changed(folder: Path, family: str = "nemotron-h", **changes: Any) -> Path:
    """A config.json with these changes; ``None`` removes a key."""
    make_model(family).config.save_pretrained(folder)
    path = folder / "config.json"
    values = json.loads(path.read_text()) | {"architectures": ["NemotronHForCausalLM"]} | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    return path


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("family", ["nemotron-h", "nemotron-h-dense"])
def test_logits(family: str, seed: int, tmp_path: Path) -> None:
    model = make_model(family, seed)
    model.save_pretrained(tmp_path)
    got = log_probabilities(load(tmp_path), some_tokens(), "float32")
    assert (got - expected(model, some_tokens())).abs().max() < 1e-4
    assert len(set(got.argmax(-1).tolist())) > 5


def test_the_names_of_published_files(tmp_path: Path) -> None:
    """Tensors within ``backbone`` and a pattern of letters, or the names of transformers since version 5."""
    model = make_model("nemotron-h")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    reference = expected(model, some_tokens())
    for prefix in ("backbone.", "model."):
        named = {name.replace("model.", prefix).replace("backbone.", prefix): value for name, value in tensors.items()}
        save_file(named, tmp_path / "model.safetensors")
        path = tmp_path / "config.json"
        values = json.loads(path.read_text())
        for key in ("layers_block_type", "layer_types"):
            values.pop(key, None)
        path.write_text(json.dumps(values | {"hybrid_override_pattern": PATTERN}))
        got = log_probabilities(load(tmp_path), some_tokens(), "float32")
        assert (got - reference).abs().max() < 1e-4


def test_layers_and_sizes(tmp_path: Path) -> None:
    config = read_hf_config(changed(tmp_path))
    assert (config.num_layers, config.num_stored_layers, config.stored_layers) == (7, 12, LAYERS)
    assert config.state_layers == (True, True, False, True, True, False, True)
    assert config.states == Mamba2Config(6, 32, 48, 2, 4, dt_limits=(0.5, float("inf")))
    assert config.unrotated_layers == set(range(7))
    assert [config.has_mlp(layer) for layer in range(7)] == [True, True, True, False, True, True, False]
    assert [config.has_experts(layer) for layer in range(7)] == [False, True, True, False, False, False, False]
    assert (config.intermediate_size, config.dense_intermediate_size, config.shared_intermediate_size) == (48, 96, 80)
    assert (config.activation, config.gated, config.norm_eps) == ("relu2", False, 1e-5)
    dense = read_hf_config(changed(tmp_path, "nemotron-h-dense"))
    assert (dense.num_experts, dense.intermediate_size, dense.shared_intermediate_size) == (0, 96, 0)


def test_other_names_come_first(tmp_path: Path) -> None:
    path = changed(tmp_path, mamba_n_groups=3, mamba_d_conv=3, mamba_conv_bias=False, mamba_dt_min=0.25)
    config = transformers.NemotronHConfig.from_pretrained(tmp_path)
    assert (config.n_groups, config.conv_kernel, config.use_conv_bias, config.time_step_min) == (3, 3, False, 0.25)
    expected_sizes = Mamba2Config(6, 32, 48, 3, 3, conv_bias=False, dt_limits=(0.25, float("inf")))
    assert read_hf_config(path).states == expected_sizes


@pytest.mark.parametrize("family", ["nemotron-h", "nemotron-h-latent"])
def test_memory(family: str, tmp_path: Path) -> None:
    make_model(family).save_pretrained(tmp_path)
    checkpoint = HFCheckpoint(tmp_path)
    total = sum(checkpoint.tensors.num_bytes(name) for name in checkpoint.tensors.names)
    assert checkpoint.weight_bytes("cpu") == total
    assert abs(Weights.of(checkpoint).memory_bytes - total) < 0.1 * total


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"layers_block_type": ["mamba", "experts"]}, CheckpointFormatError, "layers_block_type: expected full_att"),
        ({"layers_block_type": [["mamba"]]}, CheckpointFormatError, "layers_block_type: expected full_attention, lin"),
        ({"layers_block_type": []}, CheckpointFormatError, "hybrid_override_pattern is missing"),
        ({"layers_block_type": None, "hybrid_override_pattern": "M*X"}, CheckpointFormatError, "layers_block_type"),
        ({"layers_block_type": ["mlp", "mamba", "attention"]}, UnsupportedModelError, "before each MLP, got mlp at 0"),
        ({"layers_block_type": ["mamba", "mlp", "moe"]}, UnsupportedModelError, "before each MLP, got moe at 2"),
        ({"layers_block_type": ["mamba", "mlp"]}, UnsupportedModelError, "at least one full_attention, got none"),
        ({"mlp_hidden_act": "silu"}, UnsupportedModelError, "mlp_hidden_act must be 'relu2', got 'silu'"),
        ({"mamba_hidden_act": "gelu"}, UnsupportedModelError, "mamba_hidden_act must be 'silu', got 'gelu'"),
        ({"mlp_bias": True}, UnsupportedModelError, "mlp_bias must be False, got True"),
        ({"attention_bias": True}, UnsupportedModelError, "attention_bias must be False, got True"),
        ({"moe_latent_size": 0}, CheckpointFormatError, "moe_latent_size"),
        ({"sliding_window": 32}, UnsupportedModelError, "sliding_window must be null, got 32"),
        ({"ssm_state_size": 24}, UnsupportedModelError, "ssm_state_size must be a multiple of 16 up to 256, got 24"),
        ({"n_groups": 4}, CheckpointFormatError, "mamba_num_heads: expected a multiple of 4, got 6"),
        ({"conv_kernel": 5}, UnsupportedModelError, "conv_kernel must be from 2 to 4, or 7, got 5"),
        ({"time_step_min": -1.0}, CheckpointFormatError, "time_step_min"),
    ],
)
def test_bad_configurations(changes: dict[str, Any], error: type[FastinferError], message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        read_hf_config(changed(tmp_path, **changes))


@pytest.mark.parametrize(
    "name",
    [
        *("0.norm", "1.norm", "2.mixer.D", "3.mixer.gate", "3.mixer.experts.2.up_proj"),
        *("5.mixer.shared_experts.down_proj", "3.mixer.fc1_latent_proj", "5.mixer.fc2_latent_proj"),
    ],
)
def test_missing_tensors(name: str, tmp_path: Path) -> None:
    make_model("nemotron-h-latent").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {key: value for key, value in tensors.items() if f".layers.{name}." not in f"{key}."}
    assert len(kept) < len(tensors)
    save_file(kept, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointFormatError, match=rf"{name}.*missing"):
        load(tmp_path)


@pytest.mark.parametrize("family", ["nemotron-h-plain", "nemotron-h-moe"])
def test_logits_of_a_gguf_file(family: str, tmp_path: Path) -> None:
    model = make_model(family)
    write_gguf(tmp_path / "model.gguf", model)
    checkpoint = GGUFCheckpoint(GGUFFile(tmp_path / "model.gguf"), exact=True)
    got = log_probabilities(load_decoder(checkpoint, Precision.of("float32"), None), some_tokens(), "float32")
    assert (got - expected(model, some_tokens())).abs().max() < 1e-4


def test_layers_and_sizes_of_a_gguf_file(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", make_model("nemotron-h-plain"))
    config = read_gguf_config(GGUFFile(tmp_path / "model.gguf"))
    assert (config.num_layers, config.num_stored_layers, config.stored_layers) == (7, 12, LAYERS)
    assert config.state_layers == (True, True, False, True, True, False, True)
    assert config.states == Mamba2Config(6, 32, 48, 2, 4)
    assert config.unrotated_layers == set(range(7))
    assert [config.has_mlp(layer) for layer in range(7)] == [True, True, True, False, True, True, False]
    assert (config.num_experts, config.intermediate_size, config.num_kv_heads) == (0, 96, 2)
    assert (config.activation, config.gated) == ("relu2", False)
    write_gguf(tmp_path / "model.gguf", make_model("nemotron-h-moe"))
    config = read_gguf_config(GGUFFile(tmp_path / "model.gguf"))
    assert config.stored_layers == LAYERS
    assert [config.has_experts(layer) for layer in range(7)] == [True, True, True, False, True, True, False]
    assert (config.num_experts, config.intermediate_size, config.shared_intermediate_size) == (8, 48, 80)
    assert (config.router.scoring, config.router.has_bias, config.router.scale) == ("sigmoid", True, 1.5)


def test_width_of_experts(tmp_path: Path) -> None:
    """Experts may read projected hidden states; without experts the setting means nothing."""
    config = read_hf_config(changed(tmp_path, "nemotron-h-latent"))
    assert (config.expert_latent_size, config.expert_width, config.hidden_size) == (40, 40, 64)
    assert read_hf_config(changed(tmp_path)).expert_width == 64
    assert read_hf_config(changed(tmp_path, "nemotron-h-dense", moe_latent_size=40)).expert_latent_size == 0
    write_gguf(tmp_path / "model.gguf", make_model("nemotron-h-moe-latent"))
    assert read_gguf_config(GGUFFile(tmp_path / "model.gguf")).expert_latent_size == 24


def test_layers_for_later_tokens(tmp_path: Path) -> None:
    """A file may have a last layer of attention and experts that predicts a token after the next one."""
    write_gguf(tmp_path / "model.gguf", make_model("nemotron-h-moe"))
    file = GGUFFile(tmp_path / "model.gguf")
    expected_config = read_gguf_config(file)
    for key, size in (("attention.head_count_kv", 2), ("feed_forward_length", 48)):
        name = f"nemotron_h_moe.{key}"
        file.metadata[name] = np.append(file.metadata[name], size).astype(np.int32)
    file.metadata |= {"nemotron_h_moe.block_count": 13, "nemotron_h_moe.nextn_predict_layers": 1}
    assert read_gguf_config(file) == expected_config


HEADS, INNER = "attention.head_count_kv", "feed_forward_length"


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({HEADS: [0] * 12}, GGUFFormatError, "head_count_kv: expected 0 or the same size in all layers"),
        ({HEADS: [0, 0, 1, 0, 2] + [0] * 7}, GGUFFormatError, "head_count_kv: expected 0 or the same size"),
        ({HEADS: [0, 0, 2]}, GGUFFormatError, "head_count_kv: expected 12 values, one for each layer, got 3"),
        ({HEADS: [-2] + [0] * 11}, GGUFFormatError, "head_count_kv: expected sizes from 0"),
        ({INNER: [0] * 12}, GGUFFormatError, "feed_forward_length: expected 0 or the same size in all layers"),
        ({INNER: 96}, GGUFFormatError, "head_count_kv or feed_forward_length to be 0 in each layer"),
        ({HEADS: 2, INNER: [0] * 11 + [96]}, GGUFFormatError, "head_count_kv or feed_forward_length to be 0 in each"),
        ({HEADS: [0, 2, 0, 0, 2] + [0] * 7}, GGUFFormatError, "head_count_kv or feed_forward_length to be 0 in each"),
        ({INNER: [96] + [0] * 11}, UnsupportedModelError, "attention or Mamba-2 before each MLP, got mlp at 0"),
        ({"ssm.group_count": 4}, GGUFFormatError, "time_step_rank: expected a multiple of 4, got 6"),
    ],
)
def test_bad_metadata(changes: dict[str, Any], error: type[FastinferError], message: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", make_model("nemotron-h-plain"))
    file = GGUFFile(tmp_path / "model.gguf")
    for key, value in changes.items():
        file.metadata[f"nemotron_h.{key}"] = np.array(value, np.int32) if isinstance(value, list) else value
    with pytest.raises(error, match=message) as caught:
        read_gguf_config(file)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("family", ["nemotron-h-moe", "nemotron-h-moe-latent"])
def test_memory_of_a_gguf_file(family: str, tmp_path: Path) -> None:
    model = make_model(family)
    write_gguf(tmp_path / "model.gguf", model)
    checkpoint = GGUFCheckpoint(GGUFFile(tmp_path / "model.gguf"))
    total = sum(values.numel() for values in model.state_dict().values()) * 4
    assert abs(checkpoint.weight_bytes("cpu") - total) < 0.02 * total
    assert abs(Weights.of(checkpoint).memory_bytes - total) < 0.1 * total
