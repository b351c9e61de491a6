"""Keys that a file leaves out have the values that transformers gives them, or the file is refused."""

import copy
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import transformers
from huggingface_hub.errors import StrictDataclassError

from fastinfer.errors import CheckpointFormatError, UnsupportedModelError
from fastinfer.models.config import ModelConfig
from fastinfer.models.families import FAMILIES
from fastinfer.models.hf_config import read_hf_config

WINDOWS = {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 5, "num_hidden_layers": 9}
# Where transformers' own defaults are not a model that can be computed, or have no windows.
CHANGES: dict[str, dict[str, Any]] = {
    "Qwen2": WINDOWS,
    "Qwen3": WINDOWS,
    "Qwen2Moe": WINDOWS,
    "Qwen3Moe": {"use_sliding_window": True, "sliding_window": 32},
    "SmolLM3": {"use_sliding_window": True, "sliding_window": 32},
    "Glm4Moe": {"head_dim": 128},
    "Glm4vMoeForConditionalGeneration": {"text_config": {"head_dim": 128}},
    "DeepseekV2": {"num_experts_per_tok": 6, "first_k_dense_replace": 1},
    "Lfm2": {"layer_types": ["conv"] * 30 + ["full_attention"] * 2},
    "Lfm2Moe": {"layer_types": ["conv"] * 30 + ["full_attention"] * 2},
    "GraniteMoeHybrid": {"layer_types": ["linear_attention"] * 30 + ["full_attention"] * 2},
    "FalconH1": {"mamba_n_heads": 32, "mamba_d_head": 32},
}
# Another value of these shows in the shapes of a checkpoint's tensors, or in the tensors that it has.
SHAPES = {
    "hidden_size",
    "intermediate_size",
    "dense_intermediate_size",
    "shared_intermediate_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "vocab_size",
    "latent_attention",
    "num_experts",
    "dense_layers",
    "shared_expert_gate",
}


def default_config(architecture: str) -> Any:
    kind = getattr(transformers, architecture, None)
    if kind is None:
        pytest.skip("transformers does not have it")
    name = architecture.removesuffix("ForCausalLM")
    return kind.config_class(**CHANGES.get(name, {}))


def as_file(config: Any, architecture: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return values | {"architectures": [architecture]}


def read(folder: Path, config: dict[str, Any]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(config))
    return read_hf_config(folder / "config.json")


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_missing_key_has_the_value_of_transformers(architecture: str, tmp_path: Path) -> None:
    config = default_config(architecture)
    read(tmp_path, as_file(config, architecture))  # can be read as it is
    different = []
    for key in config.get_text_config().to_dict():
        values = as_file(config, architecture)
        text = values.get("text_config", values)
        if key in ("architectures", "model_type") or key not in text:
            continue
        del text[key]
        try:
            completed = as_file(config.from_dict(copy.deepcopy(values)), architecture)
            got = asdict(read(tmp_path, values))
        except (CheckpointFormatError, UnsupportedModelError, StrictDataclassError):
            continue
        expected = asdict(read(tmp_path, completed))
        names = {name for name in got if got[name] != expected[name]}
        if names and not names & SHAPES:
            different.append((key, {name: (expected[name], got[name]) for name in names}))
    assert different == []
