"""Step 3.5, Step 3.7, Laguna and Kolibri 1: query heads, limits and gates by layer, and what is refused."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.families import SIZES, expected, load, make_model, save_model, some_tokens
from support.gguf_model_file import write_gguf
from support.teacher_forcing import log_probabilities
from torch import Tensor

from fastinfer.errors import CheckpointFormatError, FastinferError, GGUFFormatError, RequestError, UnsupportedModelError
from fastinfer.formats.gguf import GGUFFile
from fastinfer.models import open_checkpoint
from fastinfer.models.config import ModelConfig, Precision, RouterConfig
from fastinfer.models.gguf_checkpoint import GGUFCheckpoint
from fastinfer.models.gguf_config import read_gguf_config
from fastinfer.models.hf_config import read_hf_config
from fastinfer.models.loader import load_decoder
from fastinfer.models.mlp import GatedMLP
from fastinfer.models.moe import MixtureOfExperts
from fastinfer.parallel.support import check_divisible

FULL, SLIDING = "full_attention", "sliding_attention"
# As published files of Step 3.5 say it, with layers for further tokens at the end of the lists.
PUBLISHED: dict[str, Any] = {
    **{key: value for key, value in SIZES.items() if key != "num_key_value_heads"},
    "architectures": ["Step3p5ForCausalLM"],
    "model_type": "step3p5",
    "num_hidden_layers": 6,
    "num_nextn_predict_layers": 2,
    "num_attention_groups": 2,
    "head_dim": 32,
    "layer_types": [FULL, SLIDING, SLIDING, FULL, SLIDING, SLIDING, SLIDING, SLIDING],
    "attention_other_setting": {
        "attention_type": SLIDING,
        "num_attention_heads": 6,
        "num_attention_groups": 2,
        "head_dim": 32,
    },
    "sliding_window": 16,
    "moe_layers_enum": "1,2,4,5",
    "moe_num_experts": 8,
    "moe_top_k": 3,
    "moe_intermediate_size": 48,
    "share_expert_dim": 80,
    "moe_router_scaling_factor": 1.7,
    "moe_router_activation": "sigmoid",
    "use_moe_router_bias": True,
    "norm_expert_weight": True,
    "use_head_wise_attn_gate": True,
    "use_rope_layers": [],
    "zero_centered": True,
    "sink": False,
    "swiglu_limits": [0.0, 0.0, 0.2, 0.3, 0.05, 0.0, 0.0, 0.0],
    "swiglu_limits_shared": [0.1, 0.0, 0.0, 0.0, 0.3, 0.15, 0.0, 0.0],
    "rope_theta": [500.0, 100.0, 100.0, 500.0, 100.0, 100.0, 100.0, 100.0],
    "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5, 1.0, 1.0, 1.0, 1.0],
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    "yarn_only_types": [FULL],
}


def read(folder: Path, family: str, **changes: Any) -> ModelConfig:
    """The configuration with these changes; ``None`` removes a key."""
    if family == "published":
        values = PUBLISHED | changes
    else:
        config = make_model(family).config
        values = json.loads(config.get_text_config().to_json_string(use_diff=False))
        values |= {"architectures": config.architectures or [type(make_model(family)).__name__]} | changes
    values = {key: value for key, value in values.items() if value is not None}
    if values["architectures"] == ["Step3p7ForConditionalGeneration"]:
        values = {"architectures": values.pop("architectures"), "text_config": values}
    (folder / "config.json").write_text(json.dumps(values))
    return read_hf_config(folder / "config.json")


def computed(folder: Path) -> Tensor:
    return log_probabilities(load(folder), some_tokens(), "float32")


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("step3.7", {}),
        ("step3.7", {"swiglu_limits": None}),
        ("step3.7", {"swiglu_limits_shared": None, "num_sliding_attention_heads": 2}),
        ("step3.7", {"layer_types": [SLIDING] * 6, "query_pre_attn_scalar": 10.0}),
        ("step3.7-plain", {}),
        ("laguna", {}),
        ("laguna", {"num_attention_heads_per_layer": [8] * 6, "moe_router_logit_softcapping": 0.2}),
        ("laguna-elements", {}),
        ("laguna-full", {"rope_parameters": None}),
        ("kolibri", {}),
        ("kolibri", {"norm_topk_prob": True, "sliding_window": 3, "layer_types": [SLIDING] * 5 + [FULL]}),
        ("kolibri-full", {}),
        ("laguna-published-full", {}),
    ],
)
def test_log_probabilities(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    reference = expected(save_model(tmp_path, family, changes), some_tokens())
    assert (computed(tmp_path) - reference).abs().max() < 1e-4
    if changes:  # which matter
        assert (expected(make_model(family), some_tokens()) - reference).abs().max() > 0.01


def test_names_of_published_files(tmp_path: Path) -> None:
    """Files of Step 3.5 have a text alone, and layers for further tokens, which are not read."""
    model = save_model(tmp_path, "step3.7")
    tensors = {
        name: values
        for name, values in load_file(tmp_path / "model.safetensors").items()
        if not name.startswith(("vision_model", "vit_"))
    }
    assert "model.layers.1.moe.gate_proj.weight" in tensors
    tensors |= {name.replace(".5.", ".7."): values.clone() for name, values in tensors.items() if "layers.5." in name}
    save_file(tensors, tmp_path / "model.safetensors")
    config = read(tmp_path, "published")
    assert (config.architecture, config.layer_heads) == ("Step3p5ForCausalLM", (4, 6, 6, 4, 6, 6))
    assert config == read(tmp_path, "published", rope_theta=PUBLISHED["rope_theta"][:6], moe_layers_enum=[1, 2, 4, 5])
    assert (computed(tmp_path) - expected(model, some_tokens())).abs().max() < 1e-4


def test_configuration_of_step(tmp_path: Path) -> None:
    config = read(tmp_path, "step3.7")
    assert config.layer_heads == (4, 6, 6, 4, 6, 6)
    assert [config.query_heads(layer) for layer in range(6)] == [4, 6, 6, 4, 6, 6]
    assert (config.num_heads, config.q_size(0), config.q_size(1), config.gate_size(1)) == (6, 128, 192, 6)
    assert (config.windows, config.dense_layers) == ((0, 16, 16, 0, 16, 16), {0, 3})
    # The limits of dense layers are those of shared experts.
    assert config.swiglu_limits == (0.1, 0.0, 0.2, 0.0, 0.05, 0.0)
    assert config.shared_swiglu_limits == (0.1, 0.0, 0.0, 0.0, 0.3, 0.15)
    assert [config.swiglu_limit(layer) for layer in (0, 1)] == [0.1, None]
    assert (config.rotary_dim, config.local_rotary_dim, config.local_rope_theta) == (16, 32, 100.0)
    assert config.router == RouterConfig("sigmoid", has_bias=True, scale=1.7)
    plain = read(tmp_path, "step3.7-plain")
    assert (plain.layer_heads, plain.swiglu_limits, plain.shared_swiglu_limits) == ((), (), ())
    assert plain.dense_layers == {0, 1, 2}
    every = read(tmp_path, "step3.7", layer_types=[SLIDING] * 6, per_layer_config=None)
    assert (every.num_heads, every.layer_heads) == (6, ())


def test_limits_are_separate_operators_in_their_layers_alone(tmp_path: Path) -> None:
    save_model(tmp_path, "step3.7")
    limits = []
    for layer in load(tmp_path).layers:
        assert isinstance(layer.mlp, GatedMLP | MixtureOfExperts)
        shared = layer.mlp.shared.limit if isinstance(layer.mlp, MixtureOfExperts) and layer.mlp.shared else None
        limits.append((layer.mlp.limit, shared))
    assert limits == [(0.1, None), (None, None), (0.2, None), (None, None), (0.05, 0.3), (None, 0.15)]


def test_configuration_of_laguna(tmp_path: Path) -> None:
    config = read(tmp_path, "laguna")
    assert (config.layer_heads, config.num_heads) == ((4, 6, 8, 4, 10, 6), 10)
    assert (config.softplus_gate, config.head_gate, config.dense_layers) == (True, True, {0})
    assert config.router == RouterConfig("sigmoid", has_bias=True, scale=1.6)
    config = read(tmp_path, "laguna-elements")
    assert (config.head_gate, config.gate_size(2), config.router.softcap) == (False, 256, 0.5)
    rope = {FULL: {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}}
    config = read(tmp_path, "laguna", rope_parameters=rope | {SLIDING: {"rope_type": "default", "rope_theta": 9.0}})
    assert (config.rotary_dim, config.local_rotary_dim, config.local_rope_theta) == (16, 32, 9.0)


def test_configuration_of_kolibri(tmp_path: Path) -> None:
    config = read(tmp_path, "kolibri", layer_types=None)
    assert (config.windows, config.unrotated_layers) == ((16, 16, 16, 16, 0, 16), {4})
    assert config.router == RouterConfig("sigmoid", has_bias=True, renormalize=False, biased_logits=True)


def test_experts_are_chosen_by_biased_logits(tmp_path: Path) -> None:
    """Which is another choice than that by biased scores."""
    model = save_model(tmp_path, "kolibri")
    mixture: Any = load(tmp_path).layers[0].mlp
    x = torch.randn(50, 64)
    _, weights, ids = model.model.layers[0].mlp.gate(x)
    routing = mixture._route(mixture.router.linear(x))
    assert torch.equal(routing.expert_ids.sort().values.long(), ids.sort().values)
    torch.testing.assert_close(routing.expert_weights.sort().values, weights.sort().values)


@pytest.mark.parametrize(
    ("family", "changes", "error", "message"),
    [
        ("published", {"layer_types": [FULL]}, CheckpointFormatError, "layer_types: expected 6 values, got"),
        ("published", {"layer_types": [[FULL]] * 6}, CheckpointFormatError, "layer_types: expected 6 of sliding"),
        ("published", {"layer_types": FULL}, CheckpointFormatError, "layer_types"),
        ("published", {"rope_theta": "x"}, CheckpointFormatError, "rope_theta"),
        ("published", {"layer_types": ["linear"] * 6}, CheckpointFormatError, "layer_types: expected 6 of sliding"),
        ("published", {"swiglu_limits": [0.0] * 5}, CheckpointFormatError, "swiglu_limits: expected 6 values, got"),
        ("published", {"swiglu_limits": [-1.0] * 6}, CheckpointFormatError, "swiglu_limits: expected numbers from 0"),
        ("published", {"swiglu_limits_shared": ["7"] * 6}, CheckpointFormatError, "swiglu_limits_shared: expected num"),
        ("published", {"moe_layers_enum": "1,two"}, CheckpointFormatError, "moe_layers_enum: expected numbers of la"),
        ("published", {"moe_layers_enum": 3}, CheckpointFormatError, "moe_layers_enum: expected numbers of layers"),
        ("published", {"sliding_window": None}, CheckpointFormatError, "sliding_window is missing"),
        ("published", {"sink": True}, UnsupportedModelError, "sink must be False, got True"),
        ("published", {"use_rope_layers": [1]}, UnsupportedModelError, r"use_rope_layers must be \[\], got \[1\]"),
        ("published", {"zero_centered": False}, UnsupportedModelError, "zero_centered must be True, got False"),
        ("published", {"attention_bias": True}, UnsupportedModelError, "attention_bias must be False, got True"),
        ("published", {"mlp_bias": True}, UnsupportedModelError, "mlp_bias must be False, got True"),
        (
            "published",
            {"use_head_wise_attn_gate": False},
            UnsupportedModelError,
            "use_head_wise_attn_gate must be True, got False",
        ),
        (
            "published",
            {"attention_other_setting": {"num_attention_heads": 6, "num_attention_groups": 3}},
            UnsupportedModelError,
            "attention_other_setting.num_attention_groups must be num_key_value_heads = 2, got 3",
        ),
        (
            "published",
            {"attention_other_setting": {"num_attention_heads": 5}},
            CheckpointFormatError,
            "expected a multiple of 2 query heads in each layer, got 5",
        ),
        (
            "published",
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            UnsupportedModelError,
            "rotary scaling 'dynamic' is not implemented",
        ),
        (
            "laguna",
            {"num_attention_heads_per_layer": [4] * 5},
            CheckpointFormatError,
            "num_attention_heads_per_layer: expected 6 numbers from 1, got",
        ),
        (
            "laguna",
            {"num_attention_heads_per_layer": [4, 4, 4, 4, 4, 3]},
            CheckpointFormatError,
            "expected a multiple of 2 query heads in each layer, got 3",
        ),
        ("laguna", {"gating": "none"}, UnsupportedModelError, "gating must be true, 'per-head' or 'per-element', got"),
        ("laguna", {"gating": False}, UnsupportedModelError, "gating must be true, 'per-head' or 'per-element', got"),
        ("laguna", {"attention_bias": True}, UnsupportedModelError, "attention_bias must be False, got True"),
        ("laguna", {"mlp_layer_types": ["dense"]}, CheckpointFormatError, "mlp_layer_types: expected 6 of dense and"),
        (
            "laguna",
            {"moe_apply_router_weight_on_input": True},
            UnsupportedModelError,
            "moe_apply_router_weight_on_input must be False, got True",
        ),
        (
            "laguna",
            {"moe_router_logit_softcapping": -1.0},
            CheckpointFormatError,
            "moe_router_logit_softcapping: expected",
        ),
        ("kolibri", {"layer_types": [FULL]}, CheckpointFormatError, "layer_types: expected 6 of sliding_attention and"),
    ],
)
def test_bad_configurations(
    family: str, changes: dict[str, Any], error: type[FastinferError], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message) as raised:
        read(tmp_path, family, **changes)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("family", ["step3.7", "laguna", "kolibri"])
def test_a_window_without_a_length(family: str, tmp_path: Path) -> None:
    save_model(tmp_path, family)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    values.get("text_config", values)["sliding_window"] = None
    path.write_text(json.dumps(values))
    with pytest.raises(CheckpointFormatError, match="sliding_window is missing"):
        read_hf_config(path)


def test_the_layer_with_fewest_heads_limits_the_ranks(tmp_path: Path) -> None:
    save_model(tmp_path, "laguna", {"num_attention_heads_per_layer": [4, 6, 8, 4, 2, 6]})
    check_divisible(open_checkpoint(tmp_path), 2)
    with pytest.raises(RequestError, match="tensor_parallel_size must be at most 2 for this model"):
        check_divisible(open_checkpoint(tmp_path), 3)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"swiglu_limits": None, "num_sliding_attention_heads": 2},
        {"swiglu_limits_shared": None, "num_sliding_attention_heads": 4, "mlp_layer_types": ["sparse"] * 6},
    ],
)
def test_gguf_files_of_step(changes: dict[str, Any], tmp_path: Path) -> None:
    model = make_model("step3.7", **changes)
    write_gguf(tmp_path / "model.gguf", model)
    checkpoint = GGUFCheckpoint(GGUFFile(tmp_path / "model.gguf"), exact=True)
    got = log_probabilities(load_decoder(checkpoint, Precision.of("float32"), None), some_tokens(), "float32")
    assert (got - expected(model, some_tokens())).abs().max() < 1e-4


def test_gguf_metadata_of_step(tmp_path: Path) -> None:
    """Lists may have layers for further tokens, too."""
    write_gguf(tmp_path / "model.gguf", make_model("step3.7"))
    save_model(tmp_path, "step3.7")
    file, folder = GGUFFile(tmp_path / "model.gguf"), read_hf_config(tmp_path / "config.json")
    same = ("layer_heads", "num_heads", "windows", "dense_layers", "rotary_dim", "local_rotary_dim", "local_rope_theta")
    config = read_gguf_config(file)
    assert [getattr(config, name) for name in same] == [getattr(folder, name) for name in same]
    assert config.swiglu_limits == pytest.approx(folder.swiglu_limits)
    assert config.shared_swiglu_limits == pytest.approx(folder.shared_swiglu_limits)
    assert config.router.scale == pytest.approx(folder.router.scale)
    for key, value in list(file.metadata.items()):
        if isinstance(value, np.ndarray) and len(value) == 6:
            file.metadata[key] = np.append(value, value[-1])
    file.metadata |= {"step35.block_count": 7, "step35.nextn_predict_layers": 1}
    assert read_gguf_config(file) == config


@pytest.mark.parametrize(
    ("key", "value", "error", "message"),
    [
        ("attention.head_count", np.array([4, 6, 6, 4, 6, 5]), GGUFFormatError, "expected a multiple of 2 query heads"),
        ("attention.head_count", np.array([4, 6, 6]), GGUFFormatError, "head_count: expected 6 values, one for each"),
        ("attention.head_count_kv", np.array([2, 2, 2, 2, 2, 1]), UnsupportedModelError, "must be the same for all"),
        ("attention.sliding_window_pattern", np.array([True]), GGUFFormatError, "sliding_window_pattern: expected 6"),
        ("swiglu_clamp_exp", np.array([0.0, 1.0]), GGUFFormatError, "swiglu_clamp_exp: expected 6 values, one for"),
        ("swiglu_clamp_exp", np.array([0.0] * 5 + [-1.0]), GGUFFormatError, "clamp_exp: expected numbers from 0, got"),
        ("swiglu_clamp_exp", -1.0, GGUFFormatError, "expected 0.0 to .*, got -1.0"),
        ("swiglu_clamp_shexp", np.array([7] * 6), GGUFFormatError, "clamp_shexp: expected numbers from 0, got"),
        ("rope.dimension_count", 2, GGUFFormatError, "expected a rotary size that is a multiple of 4, got 2"),
    ],
)
def test_bad_gguf_files_of_step(
    key: str, value: Any, error: type[FastinferError], message: str, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "model.gguf", make_model("step3.7"), matrices=gguf.GGMLQuantizationType.F16)
    file = GGUFFile(tmp_path / "model.gguf")
    file.metadata[f"step35.{key}"] = value
    with pytest.raises(error, match=message) as raised:
        read_gguf_config(file)
    assert "\n" not in str(raised.value)
