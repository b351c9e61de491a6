"""Rotary settings in all their forms give the tables of transformers."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from fastinfer import ops
from fastinfer.models.hf_config import read_hf_config

POSITIONS = 512
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": POSITIONS,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
}
TRAINED = {"original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.5, "high_freq_factor": 5.0}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + i / 8 for i in range(16)],
    "long_factor": [2.0 + i for i in range(16)],
}
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "linear-attention-factor": {"rope_type": "linear", "factor": 4.0, "attention_factor": 1.5},  # which it ignores
    "llama3": LLAMA3 | TRAINED,
    "llama3-untrained": LLAMA3,
    "llama3-attention-factor": LLAMA3 | TRAINED | {"attention_factor": 1.5},
    "longrope": LONGROPE | TRAINED,
    "longrope-factor": LONGROPE | TRAINED | {"factor": 2.0},
    "longrope-small-factor": LONGROPE | TRAINED | {"factor": 0.5},
    "longrope-attention-factor": LONGROPE | TRAINED | {"factor": 2.0, "attention_factor": 1.3},
    "yarn": YARN | TRAINED,
    "yarn-type": {"type": "yarn", "factor": 4.0} | TRAINED,
    "yarn-two-types": YARN | TRAINED | {"type": "linear"},
    "yarn-untrained": YARN,
    "yarn-theta": YARN | TRAINED | {"rope_theta": 500.0},
    "yarn-share": YARN | TRAINED | {"partial_rotary_factor": 0.5},
    "yarn-betas": YARN | TRAINED | {"beta_fast": 20.0, "beta_slow": 2.0},
    "yarn-untruncated": YARN | TRAINED | {"truncate": False},
    "yarn-attention-factor": YARN | TRAINED | {"attention_factor": 0.7},
    "yarn-mscale": YARN | TRAINED | {"mscale": 0.7},
    "yarn-mscale-all-dim": YARN | TRAINED | {"mscale_all_dim": 0.7},
    "yarn-mscales": YARN | TRAINED | {"mscale": 0.7, "mscale_all_dim": 1.2},
    "yarn-mscale-0": YARN | TRAINED | {"mscale": 1.0, "mscale_all_dim": 0.0},
    "yarn-mscales-small-factor": YARN | TRAINED | {"factor": 0.5, "mscale": 0.7, "mscale_all_dim": 1.2},
    "yarn-small-factor": YARN | TRAINED | {"factor": 0.5},
}
CASES = [
    ("Llama", name, key, outer)
    for name in SETTINGS
    for key, outer in (("rope_parameters", {}), ("rope_scaling", {"original_max_position_embeddings": 100}))
]
# Its configuration has a trained length, which comes before that of the settings.
CASES += [("Phi3", "longrope", "rope_scaling", outer) for outer in ({}, {"original_max_position_embeddings": 100})]


def table_of(name: str, values: dict[str, Any]) -> torch.Tensor:
    kind: Any = {"Llama": LlamaRotaryEmbedding, "Phi3": Phi3RotaryEmbedding}[name]
    config = getattr(transformers, f"{name}Config")(**copy.deepcopy(values))
    with torch.no_grad():
        tables = kind(config)(torch.zeros(1), torch.arange(POSITIONS)[None])
    return torch.cat([table[0].chunk(2, dim=-1)[0] for table in tables], dim=-1)


@pytest.mark.parametrize(("family", "name", "key", "outer"), CASES)
def test_tables_of_transformers(family: str, name: str, key: str, outer: dict[str, Any], tmp_path: Path) -> None:
    values = SIZES | outer | {key: SETTINGS[name]}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [f"{family}ForCausalLM"], **values}))
    config = read_hf_config(tmp_path / "config.json")
    got = ops.cos_sin_cache(config.rotary_dim, POSITIONS, config.rope_theta, config.rope_scaling)
    torch.testing.assert_close(got, table_of(family, values), rtol=0, atol=1e-3)


def test_the_old_name_comes_before_the_new_one(tmp_path: Path) -> None:
    values = SIZES | {"rope_scaling": SETTINGS["linear"], "rope_parameters": SETTINGS["default"]}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **values}))
    config = read_hf_config(tmp_path / "config.json")
    assert (config.rope_theta, config.rope_scaling.kind) == (1e4, "linear")
    torch.testing.assert_close(
        ops.cos_sin_cache(32, POSITIONS, config.rope_theta, config.rope_scaling), table_of("Llama", values)
    )
