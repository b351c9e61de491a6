"""Models of text and images or sound of which only the text part is read: the logits of transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.families import EXPERTS, FAMILIES, GROUPS, LATENT, LFM2, SIZES, load, some_tokens
from support.teacher_forcing import log_probabilities
from torch import Tensor

from fastinfer.errors import FastinferError
from fastinfer.models.hf_checkpoint import HFCheckpoint
from fastinfer.models.hf_config import read_hf_config
from fastinfer.models.hf_text_parts import TEXT_KINDS

VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "projection_dim": 32,
    "out_hidden_size": 64,
    "vocab_size": 32,
}
QWEN_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
    "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [0],
}
AUDIO = {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "output_dim": 64}
GRANITE = FAMILIES["granite"][1]
GRANITE_4: dict[str, Any] = {"deepstack_layer_map": [], "spatial_target_layers": [0, 1, 2, 3], "downsample_rate": "1/2"}
LLAMA4 = {"boi_token_index": 3, "eoi_token_index": 4, "image_token_index": 5}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}}
# The class, the kind of text model, its settings, the kind of the vision tower, and other settings.
MODELS: dict[str, tuple[str, str, dict[str, Any], str, dict[str, Any]]] = {
    "aria": (
        "Aria",
        "aria_text",
        {"moe_num_experts": 6, "moe_topk": 3, "moe_num_shared_experts": 2},
        "idefics3_vision",
        {},
    ),
    "aya-vision": ("AyaVision", "cohere2", {"sliding_window": 16, "logit_scale": 0.3}, "siglip_vision_model", {}),
    "cohere2-vision": ("Cohere2Vision", "cohere2", {"sliding_window": 16}, "siglip_vision_model", {}),
    "got-ocr2": ("GotOcr2", "qwen2", {}, "got_ocr2_vision", {}),
    "granite4-vision": ("Granite4Vision", "granite4_vision_text", GRANITE, "siglip_vision_model", GRANITE_4),
    "granite-docling": ("GraniteDocling", "granite_docling_text", GRANITE, "granite_docling_vision", {}),
    "idefics3": ("Idefics3", "llama", {}, "idefics3_vision", {}),
    "internvl": ("InternVL", "qwen2", {}, "internvl_vision", {}),
    "internvl-qwen3-moe": ("InternVL", "qwen3_moe", EXPERTS | {"head_dim": 32}, "internvl_vision", {}),
    "kimi-k2.5": (
        "Kimi_K25",
        "deepseek_v3",
        LATENT | GROUPS | {"num_experts_per_tok": 3},
        "kimi_k25_vision",
        {"tie_word_embeddings": False},
    ),
    "lfm2-vl": ("Lfm2Vl", "lfm2", LFM2, "siglip2_vision_model", {}),
    "lfm3-vl": ("Lfm3Vl", "lfm3", FAMILIES["lfm3"][1], "lfm3_vl_vision", {}),
    "llama4": ("Llama4", "llama4_text", FAMILIES["llama4"][1], "llama4_vision_model", LLAMA4),
    "llava": ("Llava", "llama", {"attention_bias": True}, "clip_vision_model", {}),
    "llava-mistral": ("Llava", "mistral", {"sliding_window": 16}, "clip_vision_model", {}),
    "llava-phi3": ("Llava", "phi3", {"sliding_window": 40}, "clip_vision_model", {}),
    "llava-next-granite": ("LlavaNext", "granite", GRANITE, "siglip_vision_model", {}),
    "llava-onevision": ("LlavaOnevision", "qwen2", {"tie_word_embeddings": True}, "siglip_vision_model", {}),
    "ovis2": ("Ovis2", "qwen2", {}, "ovis2_vision", {"hidden_size": 64, "vocab_size": 320}),
    "qianfan-ocr": ("QianfanOCR", "qwen3", {"head_dim": 32}, "qianfan_ocr_vision", {}),
    "qwen2.5-omni": ("Qwen2_5OmniThinker", "qwen2_5_omni_text", MROPE, "qwen2_5_omni_vision_encoder", {}),
    "qwen3-omni-moe": (
        "Qwen3OmniMoeThinker",
        "qwen3_omni_moe_text",
        EXPERTS | MROPE,
        "qwen3_omni_moe_vision_encoder",
        {},
    ),
    "smolvlm": ("SmolVLM", "llama", {"rms_norm_eps": 1e-5}, "smolvlm_vision", {}),
}


def make(name: str) -> Any:
    """A model in fp32 whose vectors are random, too."""
    kind, text_kind, settings, vision_kind, more = MODELS[name]
    text = {**SIZES, **settings, "model_type": text_kind}
    vision = {**(QWEN_VISION if kind.startswith("Qwen") else VISION), "model_type": vision_kind}
    if kind == "Granite4Vision":
        vision["hidden_size"] = 64
    if kind.startswith("Qwen"):
        more = {**more, "audio_config": AUDIO}
    config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=vision, **more)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) / 5)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn_like(buffer) / 5)
    return model


def expected(model: Any) -> Tensor:
    if type(model).__name__ == "Llama4ForConditionalGeneration":
        model = model.language_model  # without images, the whole model of transformers 5.24 fails
    with torch.inference_mode():
        logits: Tensor = model(input_ids=torch.tensor([some_tokens()])).logits[0]
    return logits.log_softmax(-1)


def published(model: Any) -> dict[str, Tensor]:
    """Its tensors, by the names that models of this kind were published with, and each expert by itself."""
    tensors = {}
    for name, values in model.state_dict().items():
        name = name.replace("model.language_model.", "language_model.model.")
        name = name.replace("lm_head.", "language_model.lm_head.")
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = values.contiguous()
            continue
        owner, _, stack = name.rpartition(".")
        parts = ("gate_proj", "up_proj") if stack == "gate_up_proj" else ("down_proj",)
        for expert, matrices in enumerate(values):
            for part, matrix in zip(parts, matrices.chunk(len(parts)), strict=True):
                tensors[f"{owner}.{expert}.{part}.weight"] = matrix.contiguous()
    return tensors


def changed(folder: Path, **changes: Any) -> None:
    """Change fields of config.json, those of ``text_config`` as a whole; ``None`` removes one."""
    path = folder / "config.json"
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


@pytest.mark.parametrize("name", MODELS)
def test_logits(name: str, tmp_path: Path) -> None:
    model = make(name)
    model.save_pretrained(tmp_path)
    if name in ("kimi-k2.5", "qianfan-ocr"):  # transformers would rename parts of the text model as those of the others
        save_file(published(model), tmp_path / "model.safetensors")
    got = log_probabilities(load(tmp_path), some_tokens(), "float32")
    assert (got - expected(model)).abs().max() < 1e-4
    assert len(set(got.argmax(-1).tolist())) > 5


@pytest.mark.parametrize("architecture", ["Kimi_K25ForConditionalGeneration", "KimiVLForConditionalGeneration"])
@pytest.mark.parametrize("kind", ["kimi_k2", "deepseek_v3", None])
def test_names_of_kimi(architecture: str, kind: str | None, tmp_path: Path) -> None:
    make("kimi-k2.5").config.save_pretrained(tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    changed(tmp_path, architectures=["DeepseekV3ForCausalLM"], text_config=None, **text | {"model_type": None})
    expected = read_hf_config(tmp_path / "config.json")
    text = {**text, "model_type": kind} if kind else {key: text[key] for key in text if key != "model_type"}
    changed(tmp_path, architectures=[architecture], text_config=text)
    assert read_hf_config(tmp_path / "config.json") == expected


@pytest.mark.parametrize("name", ["qwen2.5-omni", "qwen3-omni-moe"])
def test_the_part_of_a_model_that_writes(name: str, tmp_path: Path) -> None:
    """Beside it is one that speaks."""
    model = make(name)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for key in [key for key in config if key != "architectures"]:
        changed(tmp_path, **{key: None})
    changed(tmp_path, architectures=[f"{MODELS[name][0].removesuffix('Thinker')}ForConditionalGeneration"])
    changed(tmp_path, thinker_config=config, talker_config={"text_config": {"hidden_size": 7}})
    tensors = load_file(tmp_path / "model.safetensors")
    other = {"talker.model.layers.0.self_attn.q_proj.weight": torch.zeros(7, 7)}
    save_file({f"thinker.{key}": values for key, values in tensors.items()} | other, tmp_path / "model.safetensors")
    got = log_probabilities(load(tmp_path), some_tokens(), "float32")
    assert (got - expected(model)).abs().max() < 1e-4


def test_only_the_text_part_counts(tmp_path: Path) -> None:
    make("llava").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    text = [values.nbytes for key, values in tensors.items() if key.startswith("language_model.")]
    assert len(text) < len(tensors)
    assert HFCheckpoint(tmp_path, exact=True).weight_bytes("cpu") == sum(text)


@pytest.mark.parametrize("kind", [kind for kind, text in TEXT_KINDS.items() if text.defaults])
def test_defaults_are_those_of_transformers(kind: str) -> None:
    changes = {"use_sliding_window": True} if kind == "qwen2_5_omni_text" else {}
    values = transformers.AutoConfig.for_model(kind, **changes).to_dict()
    values = (values.get("rope_parameters") or {}) | values
    defaults = TEXT_KINDS[kind].defaults
    assert {key: values[key] for key in defaults} == defaults


def test_a_file_that_names_only_what_is_not_as_in_the_first_model(tmp_path: Path) -> None:
    """The file of LLaVA 1.5 is one."""
    text = {"model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "vocab_size": 32064}
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["LlavaForConditionalGeneration"], "text_config": text})
    )
    config = read_hf_config(tmp_path / "config.json")
    assert (config.architecture, config.num_layers, config.num_kv_heads) == ("LlamaForCausalLM", 32, 32)
    assert (config.intermediate_size, config.max_position, config.vocab_size) == (11008, 4096, 32064)
    changed(tmp_path, architectures=["InternVLForConditionalGeneration"], text_config={"hidden_size": 64})
    config = read_hf_config(tmp_path / "config.json")
    assert (config.architecture, config.hidden_size, config.intermediate_size) == ("Qwen2ForCausalLM", 64, 22016)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config": None}, "text_config is missing"),
        ({"text_config": {"model_type": "bert"}}, "text_config.model_type 'bert' is not implemented for Llava"),
        ({"text_config": [1]}, "text_config: expected dict"),
        ({"architectures": ["AriaForConditionalGeneration"], "text_config": {"hidden_act": "gelu"}}, "must be 'silu'"),
        ({"architectures": ["AriaForConditionalGeneration"], "text_config": {"mlp_bias": True}}, "mlp_bias must be"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    make("llava").config.save_pretrained(tmp_path)
    changed(tmp_path, architectures=["LlavaForConditionalGeneration"])
    changed(tmp_path, **changes)
    with pytest.raises(FastinferError, match=message) as caught:
        read_hf_config(tmp_path / "config.json")
    assert "\n" not in str(caught.value)
