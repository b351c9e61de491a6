"""Small random models of text and images, made by transformers, with images for them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor

from support.families import EXPERTS, LINEAR, SHARED, SIZES

IMAGE_ID, START_ID, END_ID = 300, 301, 302
VISION: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_heads": 4,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 36,
    "initializer_range": 0.15,
}
TEXT = SIZES | {"head_dim": 32}
# Sections that are not those by default; of a head of 32, and of a quarter of a head.
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [7, 5, 4]}
QWEN3_5_TEXT = SIZES | LINEAR | {"head_dim": 64, "initializer_range": 0.04}
QWEN3_5_ROPE = ROPE | {"partial_rotary_factor": 0.25, "mrope_section": [4, 3, 1]}
QWEN2_5_VISION = VISION | {
    "window_size": 16,
    "fullatt_block_indexes": [1],
    "hidden_act": "silu",
}

FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3-vl": ("Qwen3VL", TEXT | {"rope_parameters": ROPE}, VISION | {"deepstack_visual_indexes": [0, 2]}),
    "qwen3-vl-moe": (
        "Qwen3VLMoe",
        TEXT | EXPERTS | {"rope_parameters": ROPE},
        VISION | {"deepstack_visual_indexes": [1]},
    ),
    "qwen3.5-moe": ("Qwen3_5Moe", QWEN3_5_TEXT | SHARED | {"rope_parameters": QWEN3_5_ROPE}, VISION),
    "qwen3.5": ("Qwen3_5", QWEN3_5_TEXT | {"rope_parameters": QWEN3_5_ROPE}, VISION),
    "gemma3": (
        "Gemma3",
        TEXT | {"sliding_window": 24, "query_pre_attn_scalar": 20, "num_hidden_layers": 7},
        {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
        | {"image_size": 32, "patch_size": 4, "initializer_range": 0.15},
    ),
    "qwen2.5-vl": ("Qwen2_5_VL", SIZES | {"rope_parameters": ROPE | {"mrope_section": [3, 2, 3]}}, QWEN2_5_VISION),
}
# As Qwen's.
TEMPLATE = (
    "{% for message in messages %}{{ message.role[0] }}:"
    "{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %};{% endfor %}a:"
)
GEMMA_TEMPLATE = TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "<start_of_image>")
GEMMA_PROCESSOR = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 32, "width": 32}}
NAMES = {256: "</s>", IMAGE_ID: "<|image_pad|>", START_ID: "<|vision_start|>", END_ID: "<|vision_end|>"}
GEMMA_NAMES = {256: "</s>", IMAGE_ID: "<image_soft_token>", START_ID: "<start_of_image>", END_ID: "<end_of_image>"}
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 64, "longest_edge": 4096},
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.5, 0.6, 0.7],
}


def save_model(
    folder: Path,
    family: str,
    changes: dict[str, Any] | None = None,
    *,
    vision_changes: dict[str, Any] | None = None,
    prepare: Callable[[Any], None] | None = None,
) -> Any:
    """Write a model in fp32 as a folder of safetensors; returns it.

    Args:
        folder: the folder.
        family: one of the ``FAMILIES``.
        changes: changes of the text part's configuration.
        vision_changes: changes of the encoder's configuration.
        prepare: function that changes the weights before they are written.
    """
    name, text, vision = FAMILIES[family]
    text, vision = text | (changes or {}), vision | (vision_changes or {})
    is_gemma = name == "Gemma3"
    if is_gemma:
        ids = {"image_token_index": IMAGE_ID, "boi_token_index": START_ID, "eoi_token_index": END_ID}
        ids["mm_tokens_per_image"] = 16
    else:
        ids = {"image_token_id": IMAGE_ID, "video_token_id": 303}
        ids |= {"vision_start_token_id": START_ID, "vision_end_token_id": END_ID}
    make_config = getattr(transformers, f"{name}Config")
    config = make_config(text_config=text, vision_config=vision, tie_word_embeddings=is_gemma, **ids)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() == 1 or parameter_name.endswith("mm_input_projection_weight"):
                parameter.add_(torch.randn_like(parameter) / 5)
        if prepare is not None:
            prepare(model)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(GEMMA_PROCESSOR if is_gemma else PROCESSOR))
    _write_tokenizer(folder, GEMMA_NAMES if is_gemma else NAMES, GEMMA_TEMPLATE if is_gemma else TEMPLATE)
    return model


def _write_tokenizer(folder: Path, names: dict[int, str], template: str) -> None:
    """Single bytes, and the tokens of images under their ids."""
    letters = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Backend(models.BPE(vocab=letters, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens([names.get(token_id, f"<unused{token_id}>") for token_id in range(256, 304)])
    backend.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "</s>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """An image of smooth random colours."""
    generator = torch.Generator().manual_seed(seed)
    colors = torch.randint(0, 256, (5, 7, 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(colors.numpy()).resize((width, height), Image.Resampling.BICUBIC)


def expected(model: Any, folder: Path, ids: list[int], images: list[Image.Image]) -> Tensor:
    """The log-probabilities of a prompt whose images have their tokens, by transformers: [tokens, vocab]."""
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    inputs = processor(images=images, return_tensors="pt")
    tokens = torch.tensor([ids])
    kind = "token_type_ids" if "num_crops" in inputs else "mm_token_type_ids"
    inputs.pop("num_crops", None)
    with torch.inference_mode():
        logits = model(input_ids=tokens, **{kind: (tokens == IMAGE_ID).int()}, **inputs).logits
    return logits[0].float().log_softmax(-1)
