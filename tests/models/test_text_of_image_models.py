"""The language models within models of text and images, against transformers, in fp32."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from support.families import EXPERTS, HEADS, SIZES, load, some_tokens
from support.teacher_forcing import log_probabilities
from torch import Tensor

from fastinfer.errors import UnsupportedModelError
from fastinfer.models.hf_config import read_hf_config

# Half of each head is rotated. The sections are for the parts of a position, which are the same in a text.
ROPE = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
GLM_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
    "image_size": 28,
    "patch_size": 14,
}
GLM4V = {**SIZES, "rope_parameters": ROPE}
GLM4V_MOE = {**GLM4V, **EXPERTS, "n_routed_experts": 8, "n_shared_experts": 2, "routed_scaling_factor": 1.5}
EXAONE4 = {**SIZES, **HEADS, "num_hidden_layers": 5, "sliding_window": 16, "sliding_window_pattern": 4}
EXAONE_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "num_key_value_heads": 2,
    "out_hidden_size": 64,
}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "glm4v": ("Glm4v", GLM4V, GLM_VISION),
    "glm4v-moe": ("Glm4vMoe", GLM4V_MOE, GLM_VISION),
    "glm46v": ("Glm46V", {**GLM4V, "model_type": "glm4v_text"}, {**GLM_VISION, "model_type": "glm4v_vision"}),
    "glm46v-moe": (
        "Glm46V",
        {**GLM4V_MOE, "model_type": "glm4v_moe_text"},
        {**GLM_VISION, "model_type": "glm4v_moe_vision"},
    ),
    "exaone4.5": ("Exaone4_5_", {**EXAONE4, "model_type": "exaone4"}, EXAONE_VISION),
}


def make(family: str) -> Any:
    """A small model, whose vectors are random."""
    name, text, vision = MODELS[family]
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=vision)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        biases = [values for name, values in model.named_buffers() if name.endswith("e_score_correction_bias")]
        for vector in [*model.parameters(), *biases]:
            if vector.dim() == 1:
                vector.add_(torch.randn_like(vector) / 5)
    return model


def expected(model: Any) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(input_ids=torch.tensor([some_tokens()])).logits[0]
    return logits.log_softmax(-1)


@pytest.mark.parametrize("family", MODELS)
def test_log_probabilities(family: str, tmp_path: Path) -> None:
    model = make(family)
    model.save_pretrained(tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert any(name.startswith("model.language_model.layers.") for name in names)
    assert any(name.startswith("model.visual.") for name in names)
    got, reference = log_probabilities(load(tmp_path), some_tokens(), "float32"), expected(model)
    assert (got - reference).abs().max() < 1e-4
    assert len(set(reference.argmax(-1).tolist())) > 5  # else everything would agree


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Exaone4_5_ForConditionalGeneration", "must be exaone4 or exaone4_5_text, got 'llama'"),
        ("Glm46VForConditionalGeneration", "must be glm4v_text or glm4v_moe_text, got 'llama'"),
    ],
)
def test_another_language_model(name: str, message: str, tmp_path: Path) -> None:
    text = {**SIZES, "model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [name], "text_config": text}))
    with pytest.raises(UnsupportedModelError, match=f"text_config.model_type {message}"):
        read_hf_config(tmp_path / "config.json")
