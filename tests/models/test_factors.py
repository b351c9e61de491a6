"""Families whose embedding, residual stream, queries or logits have factors: Granite and Muse Glimmer."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from support.families import SIZES, expected, load, make_model, some_tokens
from support.gguf_model_file import write_gguf
from support.helpers import assert_bitwise, default_dtype
from support.teacher_forcing import log_probabilities
from torch import Tensor

from fastinfer.errors import CheckpointFormatError, FastinferError, GGUFFormatError, UnsupportedModelError
from fastinfer.formats.gguf import GGUFFile
from fastinfer.models.config import Precision
from fastinfer.models.gguf_checkpoint import GGUFCheckpoint
from fastinfer.models.gguf_config import read_gguf_config
from fastinfer.models.hf_checkpoint import HFCheckpoint
from fastinfer.models.hf_config import read_hf_config
from fastinfer.models.loader import load_decoder
from fastinfer.models.norm import RMSNorm

GRANITES = ["granite", "granite-plain", "granite-moe", "granite-moe-shared", "granite-swa", "granite-moe-swa"]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("family", GRANITES)
def test_granite(family: str, seed: int, tmp_path: Path) -> None:
    model = make_model(family, seed)
    model.save_pretrained(tmp_path)
    got = log_probabilities(load(tmp_path), some_tokens(), "float32")
    assert (got - expected(model, some_tokens())).abs().max() < 1e-4
    assert len(set(got.argmax(-1).tolist())) > 5


@pytest.mark.parametrize("factors", [(12.0, 1.0), (1.0, 0.22), (0.22, 0.22)])
def test_factors_of_embedding_and_layers(factors: tuple[float, float], tmp_path: Path) -> None:
    model = make_model("granite", embedding_multiplier=factors[0], residual_multiplier=factors[1])
    model.save_pretrained(tmp_path)
    decoder = load(tmp_path)
    assert (decoder.embedding_norm is None) == (factors[0] == factors[1])
    got = log_probabilities(decoder, some_tokens(), "float32")
    assert (got - expected(model, some_tokens())).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_norm_that_is_a_factor(dtype: torch.dtype, tmp_path: Path) -> None:
    """Of rows of all magnitudes that dtypes have, by 12 / 0.22."""
    make_model("granite").save_pretrained(tmp_path)
    norm = load(tmp_path).embedding_norm
    assert isinstance(norm, RMSNorm)
    x = (torch.randn(5, 64) * torch.tensor([1e-6, 1e-3, 1.0, 30.0, 200.0])[:, None]).to(dtype)
    exact = x.double() * (12.0 / 0.22)
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(norm(x).double(), exact, rtol=2 * step, atol=torch.finfo(dtype).smallest_normal * step)


@pytest.mark.parametrize("family", ["granite-plain", "granite-moe", "granite-moe-shared"])
def test_gguf_files(family: str, tmp_path: Path) -> None:
    model = make_model(family)
    write_gguf(tmp_path / "model.gguf", model)
    checkpoint = GGUFCheckpoint(GGUFFile(tmp_path / "model.gguf"), exact=True)
    got = log_probabilities(load_decoder(checkpoint, Precision.of("float32"), None), some_tokens(), "float32")
    assert (got - expected(model, some_tokens())).abs().max() < 1e-4


def test_metadata_of_gguf_files(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", make_model("granite-plain"))
    file = GGUFFile(tmp_path / "model.gguf")
    assert read_gguf_config(file).attention_scale == 0.125
    del file.metadata["granite.attention.scale"]
    assert read_gguf_config(file).attention_scale is None
    file.metadata["granite.rope.scaling.finetuned"] = False
    with pytest.raises(UnsupportedModelError, match=r"granite.rope.scaling.finetuned: models without rotary positions"):
        read_gguf_config(file)
    file.metadata |= {"granite.rope.scaling.finetuned": True, "granite.logit_scale": 0.0}
    with pytest.raises(GGUFFormatError, match=r"granite.logit_scale.*1e-06 to"):
        read_gguf_config(file)


def muse_glimmer(**text: Any) -> Any:
    """A model of transformers; its text part has four layers of two kinds, counted from the last."""
    small = {"num_hidden_layers": 6, "head_dim": 32, "sliding_window": 16, "initializer_range": 0.1}
    vision = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    config = transformers.MuseGlimmerConfig(
        text_config={**SIZES, **small, "model_type": "muse_glimmer_text", **text},
        vision_config=vision | {"patch_size": 4, "pos_emb_height": 4, "pos_emb_width": 4},
        out_hidden_size=32,
        projector_hidden_size=32,
    )
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.MuseGlimmerForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) / 5)
    return model


def logits_of(model: Any) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(input_ids=torch.tensor([some_tokens()])).logits[0]
    return logits.log_softmax(-1)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"qk_scale_factor": 2.0, "output_multiplier": 3.0, "final_logit_softcapping": 5.0, "post_norm_eps": 0.1},
        {"layer_types": ["full_attention", "sliding_attention"] * 3, "layer_rope_theta": [0, 1, 1, 0, 1, 1]},
    ],
)
def test_muse_glimmer(changes: dict[str, Any], tmp_path: Path) -> None:
    model = muse_glimmer(**changes)
    model.save_pretrained(tmp_path)
    assert any(name.endswith("self_attn.gate_proj.weight") for name in load_file(tmp_path / "model.safetensors"))
    decoder = load(tmp_path)
    if not changes:
        assert decoder.config.windows == (16, 0, 16, 16, 16, 0)
        assert decoder.config.unrotated_layers == {1, 5}
    got = log_probabilities(decoder, some_tokens(), "float32")
    assert (got - logits_of(model)).abs().max() < 1e-4
    assert len(set(got.argmax(-1).tolist())) > 5


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"qk_scale_factor": 2.0, "output_multiplier": 3.0, "final_logit_softcapping": 5.0, "num_hidden_layers": 5},
        {"layer_types": ["full_attention", "sliding_attention"] * 3, "layer_rope_theta": [0, 1] * 3},
    ],
)
def test_gguf_files_of_muse_glimmer(changes: dict[str, Any], tmp_path: Path) -> None:
    model = muse_glimmer(**changes)
    write_gguf(tmp_path / "model.gguf", model)
    checkpoint = GGUFCheckpoint(GGUFFile(tmp_path / "model.gguf"), exact=True)
    decoder = load_decoder(checkpoint, Precision.of("float32"), None)
    assert (log_probabilities(decoder, some_tokens(), "float32") - logits_of(model)).abs().max() < 1e-4
    model.save_pretrained(tmp_path)
    same = ("windows", "unrotated_layers", "logits_softcap", "post_norm_eps", "normed_embedding", "output_gate")
    folder = HFCheckpoint(tmp_path).config
    assert [getattr(checkpoint.config, name) for name in same] == [getattr(folder, name) for name in same]
    assert checkpoint.config.logits_scale == pytest.approx(folder.logits_scale)
    checkpoint.file.metadata["muse-glimmer.rope.freq_base_swa"] = 50.0  # only layers with windows rotate
    assert read_gguf_config(checkpoint.file).rope_theta == 50.0


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("attention.sliding_window", 0, "muse-glimmer.attention.sliding_window: expected 1 to"),
        ("attention.sliding_window_pattern", np.array([True] * 5), "sliding_window_pattern: expected 6 values, one"),
        ("logit_scale", 0.0, "muse-glimmer.logit_scale: expected 1e-06 to"),
        ("final_logit_softcapping", -1.0, "muse-glimmer.final_logit_softcapping: expected 0.0 to"),
    ],
)
def test_bad_gguf_files_of_muse_glimmer(key: str, value: Any, message: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", muse_glimmer())
    file = GGUFFile(tmp_path / "model.gguf")
    file.metadata[f"muse-glimmer.{key}"] = value
    with pytest.raises(GGUFFormatError) as error:
        read_gguf_config(file)
    assert message in str(error.value).replace("'", "")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("make", [muse_glimmer, lambda: make_model("granite")], ids=["muse glimmer", "granite"])
def test_weights_that_no_file_has(make: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    """Norms without a weight and factors have fp32 ones, whatever torch's default dtype is."""
    make().save_pretrained(tmp_path)
    wanted = log_probabilities(load(tmp_path), some_tokens(), "float32")
    with default_dtype(dtype):
        decoder = load(tmp_path)
    assert_bitwise(log_probabilities(decoder, some_tokens(), "float32"), wanted)


def test_muse_glimmer_without_lists(tmp_path: Path) -> None:
    muse_glimmer().save_pretrained(tmp_path)
    whole = HFCheckpoint(tmp_path).config
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    for key in ("layer_types", "layer_rope_theta", "qk_scale_factor", "output_multiplier", "post_norm_eps"):
        del values["text_config"][key]
    path.write_text(json.dumps(values))
    assert read_hf_config(path) == whole


@pytest.mark.parametrize(
    ("family", "changes", "error", "message"),
    [
        ("granite", {"residual_multiplier": 0.0}, CheckpointFormatError, "residual_multiplier: expected 1e-06 to"),
        ("granite", {"logits_scaling": "8"}, CheckpointFormatError, "logits_scaling: expected float, got '8'"),
        ("granite-swa", {"layer_rope_theta": [0, 1e4]}, CheckpointFormatError, "layer_rope_theta: expected 5 numbers"),
        ("granite-swa", {"layer_rope_theta": [0.5] * 5}, CheckpointFormatError, "expected 0, or numbers above 1, got"),
        (
            "granite-swa",
            {"layer_rope_theta": [1e4, 1e4, 2e4, 1e4, 1e4]},
            UnsupportedModelError,
            "layer_rope_theta must be one number for all layers with a window",
        ),
        (
            "granite-swa",
            {
                "layer_rope_theta": [1e4, 5e3, 5e3, 5e3, 1e4],
                "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
            },
            UnsupportedModelError,
            "which are equal with a rotary scaling",
        ),
    ],
)
def test_bad_configurations(
    family: str, changes: dict[str, Any], error: type[FastinferError], message: str, tmp_path: Path
) -> None:
    make_model(family).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(error, match=message):
        read_hf_config(path)


def test_biases_of_muse_glimmer_are_refused(tmp_path: Path) -> None:
    muse_glimmer().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    values["text_config"]["attention_bias"] = True
    path.write_text(json.dumps(values))
    with pytest.raises(UnsupportedModelError, match="attention_bias must be False, got True"):
        read_hf_config(path)
