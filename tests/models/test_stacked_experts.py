"""Experts that are stored in one tensor for all of a layer, or one by one: equal models, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.families import FAMILIES, SIZES, load, make_model, some_tokens
from support.teacher_forcing import log_probabilities
from torch import Tensor

from fastinfer.errors import CheckpointFormatError, UnsupportedModelError
from fastinfer.models.hf_checkpoint import HFCheckpoint

EXPERTS = "model.layers.1.mlp.experts"


def expected_logits(model: Any) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(input_ids=torch.tensor([some_tokens()])).logits[0]
    return logits.log_softmax(-1)


def save_stacked(folder: Path, model: Any) -> dict[str, Tensor]:
    """Save a model with the tensors that it has in memory; returns them."""
    model.save_pretrained(folder)
    tensors = {name: values.contiguous() for name, values in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")
    return tensors


@pytest.mark.parametrize("family", ["qwen3.5-moe", "qwen3-next"])
def test_stacked_and_single_experts_are_equal(family: str, tmp_path: Path) -> None:
    model = make_model(family)
    model.save_pretrained(tmp_path / "single")
    tensors = save_stacked(tmp_path / "stacked", model)
    single = load_file(tmp_path / "single/model.safetensors")
    name = next(name for name in tensors if name.endswith("experts.gate_up_proj"))
    assert name not in single
    assert name.replace("gate_up_proj", "7.gate_proj.weight") in single
    got = [log_probabilities(load(tmp_path / kind), some_tokens(), "float32") for kind in ("single", "stacked")]
    assert torch.equal(*got)
    assert (got[0] - expected_logits(model)).abs().max() < 1e-4


VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
VL_SIZES = {"head_dim": 32, "moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 3}


def text_and_images(kind: str, text: dict[str, Any], **vision: Any) -> Any:
    """A model of transformers for text and images, whose norms are random."""
    config = getattr(transformers, f"{kind}Config")(text_config={**SIZES, **text}, vision_config=VISION | vision)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.add_(torch.randn_like(parameter) / 5)
    return model


def test_the_language_model_of_qwen3_5_moe(tmp_path: Path) -> None:
    model = text_and_images("Qwen3_5Moe", {**FAMILIES["qwen3.5-moe"][1], "model_type": "qwen3_5_moe_text"})
    model.save_pretrained(tmp_path)
    assert any(name.startswith("model.language_model.layers.") for name in load_file(tmp_path / "model.safetensors"))
    got = log_probabilities(load(tmp_path), some_tokens(), "float32")
    assert (got - expected_logits(model)).abs().max() < 1e-4


def test_the_language_model_of_qwen3_vl_moe(tmp_path: Path) -> None:
    """Its published files have [experts, in, out]; transformers 5 writes [experts, out, in]."""
    sizes = {**VL_SIZES, "model_type": "qwen3_vl_moe_text", "mlp_only_layers": [2]}
    model = text_and_images("Qwen3VLMoe", sizes, deepstack_visual_indexes=[0])
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    got = log_probabilities(load(tmp_path), some_tokens(), "float32")
    assert (got - expected_logits(model)).abs().max() < 1e-4
    assert len(set(got.argmax(-1).tolist())) > 5
    for name in tensors:
        if ".mlp.experts." in name:
            tensors[name] = tensors[name].mT.contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    assert torch.equal(got, log_probabilities(load(tmp_path), some_tokens(), "float32"))


def test_square_experts_in_an_unknown_order_are_refused(tmp_path: Path) -> None:
    sizes = {**VL_SIZES, "model_type": "qwen3_vl_moe_text", "moe_intermediate_size": 32}
    text_and_images("Qwen3VLMoe", sizes).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="gate_up_proj': the order of its dimensions is not known"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gate_up_proj", lambda t: t.mT, r"gate_up_proj' must have the shape \[8, 96, 64\], got \[8, 64, 96\]"),
        ("gate_up_proj", lambda t: t[:, 2:], r"gate_up_proj' must have the shape \[8, 96, 64\], got \[8, 94, 64\]"),
        ("down_proj", lambda t: t[1:], r"down_proj' must have the shape \[8, 64, 48\], got \[7, 64, 48\]"),
        ("down_proj", lambda t: t[..., 1:], r"down_proj' must have the shape \[8, 64, 48\], got \[8, 64, 47\]"),
        ("gate_up_proj", lambda t: t.to(torch.float8_e4m3fn), "gate_up_proj' must be of a float dtype, got"),
        ("down_proj", None, f"tensor '{EXPERTS}.down_proj' is missing"),
    ],
)
def test_damaged_stacks(name: str, change: Any, message: str, tmp_path: Path) -> None:
    tensors = save_stacked(tmp_path, make_model("qwen3.5-moe"))
    name = f"{EXPERTS}.{name}"
    values = tensors.pop(name)
    if change is not None:
        tensors[name] = change(values).contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointFormatError, match=message):
        load(tmp_path)


@pytest.mark.parametrize("rows", [1, -2])
@pytest.mark.parametrize("name", ["in_proj_qkvz", "in_proj_ba"])
def test_matrices_by_key_head_have_all_rows_and_no_more(name: str, rows: int, tmp_path: Path) -> None:
    make_model("qwen3-next").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = f"model.layers.0.linear_attn.{name}.weight"
    values = tensors[name]
    tensors[name] = torch.cat([values, values[:rows]]) if rows > 0 else values[:rows].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointFormatError, match=f"{name.removesuffix('.weight')} must have the shape"):
        load(tmp_path)


def test_weights_that_are_not_renormalised_are_refused(tmp_path: Path) -> None:
    """The code of these models does not read the setting."""
    make_model("qwen3.5-moe").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"norm_topk_prob": False}))
    with pytest.raises(UnsupportedModelError, match="norm_topk_prob must be True, got False"):
        HFCheckpoint(tmp_path)
