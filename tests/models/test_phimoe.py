"""Phi-3.5-MoE: the choice of experts by SparseMixer, and the factor of rotations."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from support.families import LONGROPE, expected, make_model, some_tokens
from support.gguf_model_file import write_gguf
from support.teacher_forcing import log_probabilities
from torch import Tensor

from fastinfer.formats.gguf import GGUFFile
from fastinfer.models.config import ModelConfig, Precision, RouterConfig
from fastinfer.models.gguf_checkpoint import GGUFCheckpoint
from fastinfer.models.hf_checkpoint import HFCheckpoint
from fastinfer.models.hf_config import read_hf_config
from fastinfer.models.loader import load_decoder

MSCALES = {**LONGROPE, "short_mscale": 1.3, "long_mscale": 1.3}


def saved(folder: Path, **sizes: Any) -> tuple[Any, ModelConfig]:
    model = make_model("phimoe-plain", **sizes)
    model.save_pretrained(folder)
    return model, read_hf_config(folder / "config.json")


def computed(folder: Path, max_model_len: int | None = None) -> Tensor:
    decoder = load_decoder(HFCheckpoint(folder), Precision.of("float32"), max_model_len)
    return log_probabilities(decoder, some_tokens(), "float32")


@pytest.mark.parametrize("jitter", [0.0, 0.02, 0.5, 1.0])
def test_experts_that_take_part_in_the_weights(jitter: float, tmp_path: Path) -> None:
    """Without tolerance an expert's weight is 1."""
    model, config = saved(tmp_path, router_jitter_noise=jitter)
    assert config.router == RouterConfig("sparsemixer", renormalize=False, jitter=jitter)
    got = log_probabilities(
        load_decoder(HFCheckpoint(tmp_path), Precision.of("float32"), None), some_tokens(), "float32"
    )
    assert (got - expected(model, some_tokens())).abs().max() < 1e-4
    other = expected(make_model("phimoe-plain", router_jitter_noise=0.1), some_tokens())
    assert (got - other).abs().max() > 0.01


def test_factor_of_rotations(tmp_path: Path) -> None:
    """Up to the trained length; beyond it transformers has the factors of short texts still, unlike the model."""
    rope = {**MSCALES, "original_max_position_embeddings": 200}
    model, config = saved(tmp_path, rope_parameters=rope)
    assert (config.rope_scaling.kind, config.rope_scaling.attention_factor) == ("longrope", 1.3)
    got = log_probabilities(
        load_decoder(HFCheckpoint(tmp_path), Precision.of("float32"), 200), some_tokens(), "float32"
    )
    assert (got - expected(model, some_tokens())).abs().max() < 1e-4


def test_gguf_file_with_long_rotations(tmp_path: Path) -> None:
    """Its factor of rotations is what the file says, which the converter derives from the lengths."""
    rope = {**MSCALES, "original_max_position_embeddings": 200}
    model = make_model("phimoe-published", head_dim=16, rope_parameters=rope)

    def write_rope(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("none")
        writer.add_rope_scaling_orig_ctx_len(200)
        writer.add_rope_scaling_attn_factors(1.3)
        for kind in ("short", "long"):
            writer.add_tensor(f"rope_factors_{kind}.weight", np.array(LONGROPE[f"{kind}_factor"], np.float32))

    write_gguf(tmp_path / "model.gguf", model, more=write_rope)
    checkpoint = GGUFCheckpoint(GGUFFile(tmp_path / "model.gguf"), exact=True)
    assert checkpoint.config.rope_scaling.attention_factor == pytest.approx(1.3)
    assert checkpoint.config.router == RouterConfig("sparsemixer", renormalize=False, jitter=0.01)
    assert checkpoint.config.lm_head_bias
    got = log_probabilities(load_decoder(checkpoint, Precision.of("float32"), 200), some_tokens(), "float32")
    assert (got - expected(model, some_tokens())).abs().max() < 1e-4


def test_both_names(tmp_path: Path) -> None:
    saved(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace("PhimoeForCausalLM", "PhiMoEForCausalLM"))
    config = read_hf_config(path)
    assert config.architecture == "PhiMoEForCausalLM"
    assert (config.norm, config.lm_head_bias, config.num_experts, config.experts_per_token) == (
        "layer_norm",
        False,
        5,
        2,
    )
