"""Models with states, latent attention or stacked experts, quantised and read back: the logits of transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.families import expected, make_model, some_tokens
from support.image_models import save_model as save_image_model
from support.teacher_forcing import log_probabilities
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from fastinfer.errors import RequestError
from fastinfer.models.config import Precision
from fastinfer.models.decoder import Decoder
from fastinfer.models.hf_checkpoint import HFCheckpoint
from fastinfer.models.loader import load_decoder
from fastinfer.quantize.checkpoint import quantize_checkpoint
from fastinfer.quantize.methods import SYMMETRIC, Method
from fastinfer.quantize.rounding import round_to_nearest

GROUP = 32
SHARED = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 96}
MAMBA = {"mamba_n_heads": 32, "mamba_d_head": 16, "mamba_expand": 8, "shared_intermediate_size": 96}
FALCON = {"mamba_n_heads": 32, "mamba_d_head": 16, "mamba_d_ssm": 512}
NEMOTRON = {"mamba_num_heads": 32, "mamba_head_dim": 16, "n_groups": 4}
LATENT = {"q_lora_rank": 64, "kv_lora_rank": 56, "v_head_dim": 16, "moe_intermediate_size": 64}
# Sizes of which 32 is a divisor.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3.5": {},
    "qwen3.5-few": {"linear_num_value_heads": 6},
    "qwen3.5-moe": SHARED,
    "qwen3-next": SHARED,
    "olmo-hybrid": {},
    "lfm2": {},
    "lfm2-biases": {},
    "lfm3": {"num_attention_heads": 8},
    "lfm2-moe": {"moe_intermediate_size": 64},
    "granite-hybrid": MAMBA,
    "granite-hybrid-dense": MAMBA,
    "granite-hybrid-biases": MAMBA,
    "falcon-h1": FALCON,
    "falcon-h1-norm": FALCON,
    "nemotron-h": NEMOTRON | {"moe_intermediate_size": 64, "moe_shared_expert_intermediate_size": 96},
    "nemotron-h-latent": NEMOTRON
    | {"moe_intermediate_size": 64, "moe_shared_expert_intermediate_size": 96, "moe_latent_size": 32},
    "nemotron-h-dense": NEMOTRON,
    "deepseek-v2": LATENT | {"q_lora_rank": None},
    "deepseek-v3": LATENT,
    "glm-dsa": LATENT | {"index_topk": 64},
    "mistral4": LATENT,
    "glm4-moe-lite": LATENT,
    "minicpm3": LATENT,
    "axk1": LATENT,
    "gpt-oss": {"intermediate_size": 96},
    "afmoe": {"moe_intermediate_size": 64},
    "mimo-v2-flash": {"moe_intermediate_size": 64},
    "mimo-v2-flash-other": {"moe_intermediate_size": 64},
    "flex-olmo": {},
    "llama4": {"intermediate_size": 64, "intermediate_size_mlp": 96},
    "granite-moe": {},
    "granite-moe-shared": {"shared_intermediate_size": 96},
    "granite-moe-swa": {"shared_intermediate_size": 96},
    "gemma4-moe": {"moe_intermediate_size": 64, "global_head_dim": 64},
    "hunyuan-moe": {},
    "nemotron": {},
    "apertus": {},
    "phimoe": {},
    "olmo": {},
    "phi": {},
    "gpt-neox": {},
    "cohere2-moe": {},
    "step3.7": {
        **{"num_attention_heads": 8, "num_sliding_attention_heads": 16},
        **{"moe_intermediate_size": 64, "share_expert_dim": 96},
    },
    "laguna": SHARED | {"num_attention_heads_per_layer": [8, 16, 8, 24, 8, 16]},
    "laguna-elements": SHARED,
    "kolibri": SHARED,
    "kimi-linear": LATENT | {"q_lora_rank": None, "linear_head_dim": 32, "linear_num_heads": 4},
    "bailing-hybrid": LATENT | {"q_lora_rank": None, "num_attention_heads": 8, "num_key_value_heads": 8},
}
# Stay dense: what chooses experts or tokens, gates of heads, matrices that latent attention applies transposed,
# convolutions.
DENSE = ("embed", "lm_head", "router", ".gate.", "expert_gate", "in_proj_a.", "in_proj_b.", "in_proj_ba", "kv_b_proj")
DENSE += ("conv1d", "conv.conv", "linear_attn.a_proj", "linear_attn.b_proj", "indexer.", "vision_model.", "projector")
DENSE += ("f_a_proj", "f_b_proj", "self_attn.b_proj", ".f_proj", "A_log")


def texts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 320, (96,), generator=generator).tolist() for _ in range(4)]


def method(name: str, bits: int) -> Method:
    return Method(name, bits, GROUP, name in SYMMETRIC)


def save(folder: Path, family: str) -> Any:
    """Save a model, of which the published files have experts in one tensor also if transformers would not write it."""
    model = make_model(family, **FAMILIES[family])
    model.save_pretrained(folder)
    if family in ("qwen3.5-moe", "qwen3-next", "mistral4"):
        tensors = {name: values.contiguous() for name, values in model.state_dict().items()}
        if model.config.tie_word_embeddings:
            del tensors["lm_head.weight"]
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return model


def load(folder: Path) -> Decoder:
    return load_decoder(HFCheckpoint(folder, exact=True), Precision.of("float32"), None)


def round_weights(model: Any, bits: int) -> list[str]:
    """Round what is quantised; returns the names of what stays."""

    def rounded(matrix: Tensor) -> Tensor:
        return round_to_nearest(matrix, bits, GROUP).dequantize()

    kept = []
    is_transposed = type(model).__name__ in ("GptOssForCausalLM", "Llama4ForCausalLM")
    with torch.no_grad():
        for name, values in model.named_parameters():
            if values.dim() < 2 or name.endswith("_bias") or any(part in name for part in DENSE):
                kept.append(name)
            elif values.dim() == 2:
                values.copy_(rounded(values))
            else:
                for matrix in values.transpose(1, 2) if is_transposed else values:
                    matrix.copy_(rounded(matrix.contiguous()))
    return kept


@pytest.mark.parametrize("calibrated", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", FAMILIES)
def test_rounding_is_that_of_the_weights(family: str, calibrated: bool, tmp_path: Path) -> None:
    """Every row is where it was, and nothing else is quantised."""
    model = save(tmp_path / "model", family)
    before = load_file(tmp_path / "model/model.safetensors")
    quantize_checkpoint(tmp_path / "model", tmp_path / "out", method("rtn", 4), texts() if calibrated else [])
    kept = round_weights(model, 4)
    got = log_probabilities(load(tmp_path / "out"), some_tokens(), "float32")
    assert (got - expected(model, some_tokens())).abs().max() < 1e-3
    after = load_file(tmp_path / "out/model.safetensors")
    shared = [name for name in kept if name in before and not name.endswith("_bias")]
    assert shared
    assert all(torch.equal(before[name], after[name]) for name in shared)
    read = [name for name in after if not name.startswith("vision_model.")]
    assert not any(name.endswith(("_proj_bias", "experts.gate_up_proj", "linear.weight")) for name in read)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_input_scales_are_folded_where_they_belong(family: str, tmp_path: Path) -> None:
    """With 8 bits a factor that went astray would stand out beside what rounding changes."""
    model = save(tmp_path / "model", family)
    plain = expected(model, some_tokens())

    def change(name: str) -> float:
        quantize_checkpoint(tmp_path / "model", tmp_path / name, method(name, 8), texts())
        return float((log_probabilities(load(tmp_path / name), some_tokens(), "float32") - plain).abs().mean())

    rounded = change("int8")
    assert change("awq") < 1.5 * rounded
    assert change("w8a8") < 3 * rounded
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("model", "awq"))
    norms = [name for name in before if name.endswith((".q_a_layernorm.weight", ".operator_norm.weight"))]
    # An indexer reads the same norm.
    norms = [n for n in norms if "q_a_" not in n or n.replace("q_a_layernorm", "indexer.wk") not in before]
    assert bool(norms) == (family.startswith(("lfm2", "lfm3")) or bool(getattr(model.config, "q_lora_rank", None)))
    assert not any(torch.equal(before[name], after[name]) for name in norms)


READ = ["qwen3.5", "lfm2", "granite-hybrid-dense", "nemotron-h-dense", "nemotron", "apertus", "phi", "gpt-neox"]


@pytest.mark.parametrize("family", READ)
def test_transformers_reads_the_result(family: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    save(tmp_path / "model", family)
    quantize_checkpoint(tmp_path / "model", tmp_path / "out", method("int8", 8), [])
    got = log_probabilities(load(tmp_path / "out"), some_tokens(), "float32")
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", **options).eval()
    assert (got - expected(model, some_tokens())).abs().max() < 1e-3


@pytest.mark.parametrize("kind", ["inputs by layer", "images"])
def test_transformers_finds_linear_layers_outside_the_decoder(kind: str, tmp_path: Path) -> None:
    """They are not quantised, and an image processor's settings are there."""
    pytest.importorskip("compressed_tensors")
    if kind == "images":
        save_image_model(tmp_path / "model", "qwen3-vl")
        reader = AutoModelForImageTextToText
    else:
        make_model("gemma4-inputs", hidden_size_per_layer_input=32).save_pretrained(tmp_path / "model")
        reader = AutoModelForCausalLM
    quantize_checkpoint(tmp_path / "model", tmp_path / "out", method("int8", 8), [])
    _, found = reader.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]
    names = [path.name for path in (tmp_path / "model").glob("*processor_config.json")]
    assert bool(names) == (kind == "images")
    assert all((tmp_path / "out" / name).exists() for name in names)


@pytest.mark.parametrize("family", ["qwen3.5", "lfm2", "granite-hybrid-dense", "deepseek-v3", "gpt-oss"])
def test_gptq_is_better_than_rounding(family: str, tmp_path: Path) -> None:
    save(tmp_path / "model", family)
    errors = {}
    for name in ("rtn", "gptq"):
        report = quantize_checkpoint(tmp_path / "model", tmp_path / name, method(name, 4), texts())
        errors[name] = sum(report.errors.values())
    assert errors["gptq"] < 0.95 * errors["rtn"]


def test_all_methods_see_the_widths_of_all_inputs(tmp_path: Path) -> None:
    for family, sizes, width in (
        ("deepseek-v3", LATENT | {"q_lora_rank": 56}, 56),
        ("deepseek-v3", LATENT | {"v_head_dim": 20}, 120),
        ("nemotron-h-dense", {"mamba_num_heads": 5, "mamba_head_dim": 16, "n_groups": 1}, 80),
        ("qwen3.5", {"linear_num_key_heads": 1, "linear_num_value_heads": 5, "linear_value_head_dim": 16}, 80),
    ):
        folder = tmp_path / f"{family}-{width}"
        make_model(family, **sizes).save_pretrained(folder)
        with pytest.raises(RequestError, match=f"32 does not divide {width}"):
            quantize_checkpoint(folder, tmp_path / "out", method("rtn", 4), [])
