"""Small random models of families whose images transformers' model encodes as a whole, and their processors."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

from support.families import EXPERTS, SIZES
from support.families import FAMILIES as TEXTS

IMAGE_ID, BEGIN_ID, END_ID = 300, 301, 302
TEMPLATE = (
    "{% for message in messages %}{{ message.role[0] }}:"
    "{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}PLACEHOLDER{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %};{% endfor %}a:"
)


@dataclass(frozen=True)
class ImageFamily:
    """A small model.

    Attributes:
        name: how the names of its classes begin.
        text, vision: configurations of its parts.
        placeholder: what its template writes for an image.
        tokens: spellings of tokens from ``IMAGE_ID`` on.
        special: names by which transformers' processor finds some of them.
        fields: other values of its configuration.
        image_processor: those of the file of its image processor.
        processor: those of its processor.
    """

    name: str
    text: dict[str, Any]
    vision: dict[str, Any]
    placeholder: str
    tokens: tuple[str, ...]
    special: dict[str, str]
    fields: dict[str, Any]
    image_processor: dict[str, Any]
    processor: dict[str, Any] = field(default_factory=dict)


def _gemma4(text: str, bidirectional: str | None, **vision: Any) -> ImageFamily:
    return ImageFamily(
        name="Gemma4",
        text=SIZES
        | TEXTS[text][1]
        | {"max_position_embeddings": 1024, "use_bidirectional_attention": bidirectional, "pad_token_id": 3},
        vision={
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "patch_size": 4,
            "pooling_kernel_size": 2,
            "position_embedding_size": 300,
            "initializer_range": 0.15,
            **vision,
        },
        placeholder="<|image|>",
        tokens=("<|image|>", "<|image>", "<image|>"),
        special={"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>"}
        | {"audio_token": "<|audio|>", "boa_token": "<unused310>", "eoa_token": "<unused311>"},
        fields={
            "image_token_id": IMAGE_ID,
            "boi_token_id": BEGIN_ID,
            "eoi_token_id": END_ID,
            "video_token_id": 318,
            "audio_token_id": 319,
        },
        image_processor={
            "image_processor_type": "Gemma4ImageProcessor",
            "patch_size": 4,
            "pooling_kernel_size": 2,
            "max_soft_tokens": 70,
        },
        processor={"feature_extractor": None, "video_processor": None},
    )


def _gemma4_unified() -> ImageFamily:
    other = _gemma4("gemma4-unified", "vision")
    vision = {"patch_size": 4, "pooling_kernel_size": 2, "mm_embed_dim": 48, "mm_posemb_size": 80}
    return replace(
        other,
        name="Gemma4Unified",
        vision=vision | {"output_proj_dims": 48, "initializer_range": 0.15},
        image_processor=other.image_processor | {"image_processor_type": "Gemma4UnifiedImageProcessor"},
    )


def _mistral3(text: dict[str, Any]) -> ImageFamily:
    return ImageFamily(
        name="Mistral3",
        text=SIZES | {"max_position_embeddings": 1024} | text,
        vision={
            "model_type": "pixtral",
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "head_dim": 12,
            "patch_size": 4,
            "image_size": 64,
            "initializer_range": 0.15,
        },
        placeholder="[IMG]",
        tokens=("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        special={},
        fields={"image_token_index": IMAGE_ID, "spatial_merge_size": 2, "tie_word_embeddings": False},
        image_processor={
            "image_processor_type": "PixtralImageProcessor",
            "patch_size": 4,
            "size": {"longest_edge": 64},
            "image_mean": [0.5, 0.4, 0.3],
            "image_std": [0.5, 0.6, 0.7],
        },
        processor={"patch_size": 4, "spatial_merge_size": 2},
    )


def _idefics(name: str) -> ImageFamily:
    return ImageFamily(
        name=name,
        text=SIZES | {"model_type": "llama", "max_position_embeddings": 1024},
        vision={
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "patch_size": 4,
            "image_size": 32,
            "initializer_range": 0.15,
        },
        placeholder="<image>",
        tokens=("<image>", "<fake_token_around_image>", "<global-img>", "<row_1_col_1>", "<end_of_utterance>"),
        special={},
        fields={"image_token_id": IMAGE_ID, "scale_factor": 2, "tie_word_embeddings": False},
        image_processor={
            "image_processor_type": f"{name}ImageProcessor",
            "size": {"longest_edge": 96},
            "max_image_size": {"longest_edge": 32},
            "image_mean": [0.5, 0.4, 0.3],
            "image_std": [0.5, 0.6, 0.7],
        },
        processor={"image_seq_len": 16},
    )


def _intern(text: str) -> ImageFamily:
    return ImageFamily(
        name="InternVL",
        text=SIZES | {"max_position_embeddings": 1024, "model_type": text},
        vision={
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "patch_size": [4, 4],
            "image_size": [32, 32],
            "use_qk_norm": True,
            "initializer_range": 0.15,
        },
        placeholder="<IMG_CONTEXT>",
        tokens=("<IMG_CONTEXT>", "<img>", "</img>"),
        special={
            "context_image_token": "<IMG_CONTEXT>",
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "video_token": "<|video|>",
        },
        fields={"image_token_id": IMAGE_ID, "tie_word_embeddings": False},
        image_processor={
            "image_processor_type": "GotOcr2ImageProcessor",
            "size": {"height": 32, "width": 32},
            "max_patches": 5,
            "image_mean": [0.5, 0.4, 0.3],
            "image_std": [0.5, 0.6, 0.7],
        },
        processor={"image_seq_length": 16, "video_processor": None},
    )


def _grid(name: str, text: dict[str, Any], vision: dict[str, Any], token: str) -> ImageFamily:
    """Images whose tokens are rotated by row and column."""
    sizes = {"depth": 2, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
    return ImageFamily(
        name=name,
        text=SIZES | {"max_position_embeddings": 1024} | text,
        vision=sizes | {"initializer_range": 0.15} | vision,
        placeholder=f"<begin>{token}<end>",
        tokens=(token, "<begin>", "<end>"),
        special={"image_token": token, "video_token": "<|video|>"},
        fields={
            "image_token_id": IMAGE_ID,
            "video_token_id": 318,
            "vision_start_token_id": BEGIN_ID,
            "vision_end_token_id": END_ID,
            "image_start_token_id": BEGIN_ID,
            "image_end_token_id": END_ID,
            "tie_word_embeddings": False,
        },
        image_processor={
            "image_processor_type": f"{name.replace('Moe', '')}ImageProcessor",
            "patch_size": 4,
            "merge_size": 2,
            "temporal_patch_size": 2,
            "size": {"shortest_edge": 128, "longest_edge": 8192},
            "image_mean": [0.5, 0.4, 0.3],
            "image_std": [0.5, 0.6, 0.7],
        },
        processor={"video_processor": None},
    )


def _glm(name: str, text: dict[str, Any], part: str = "") -> ImageFamily:
    kinds = ({"model_type": f"{part}_text"}, {"model_type": f"{part}_vision"}) if part else ({}, {})
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [1, 2, 1]}
    sizes = {"hidden_size": 48, "intermediate_size": 80, "out_hidden_size": 64, "image_size": 32}
    return _grid(name, {"rope_parameters": rope} | kinds[0] | text, sizes | kinds[1], "<|image|>")


QWEN2_VL_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 2, 3]}
GLM_EXPERTS = EXPERTS | {"n_routed_experts": 8, "n_shared_experts": 2, "routed_scaling_factor": 1.5}

FAMILIES: dict[str, ImageFamily] = {
    "gemma4-inputs": _gemma4("gemma4-inputs", None, use_clipped_linears=True),
    "gemma4-moe": _gemma4("gemma4-moe", "vision", standardize=True),
    "gemma4-unified": _gemma4_unified(),
    "glm4v": _glm("Glm4v", {}),
    "glm4v-moe": _glm("Glm4vMoe", GLM_EXPERTS),
    "glm46v-moe": _glm("Glm46V", GLM_EXPERTS, "glm4v_moe"),
    "qwen2-vl": _grid(
        "Qwen2VL", {"rope_parameters": QWEN2_VL_ROPE}, {"embed_dim": 48, "hidden_size": 64}, "<|image_pad|>"
    ),
    "idefics3": _idefics("Idefics3"),
    "smolvlm": _idefics("SmolVLM"),
    "internvl": _intern("qwen2"),
    "mistral3": _mistral3({"model_type": "mistral", "sliding_window": None}),
    "mistral4": _mistral3({"model_type": "mistral4"} | TEXTS["mistral4"][1]),
    "ministral3": _mistral3({"model_type": "ministral3"} | TEXTS["ministral3"][1]),
}


def save_model(folder: Path, family: str, changes: dict[str, Any] | None = None) -> Any:
    """Write a model in fp32, with its tokenizer and image processor, as a folder; returns it."""
    own = FAMILIES[family]
    config = getattr(transformers, f"{own.name}Config")(
        text_config=own.text | (changes or {}), vision_config=own.vision, **own.fields
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{own.name}ForConditionalGeneration")(config).eval()
    _randomise(model)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(own.image_processor))
    tokenizer(own).backend_tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "</s>", "chat_template": template(own)}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return model


def template(own: ImageFamily) -> str:
    return TEMPLATE.replace("PLACEHOLDER", own.placeholder)


def tokenizer(own: ImageFamily) -> Any:
    """Single bytes, and the tokens of images under their ids."""
    letters = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Backend(models.BPE(vocab=letters, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    names = ["</s>", *(f"<unused{number}>" for number in range(257, IMAGE_ID)), *own.tokens]
    names += [f"<unused{number}>" for number in range(256 + len(names), 318)] + ["<|video|>", "<|audio|>"]
    backend.add_special_tokens(names)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", pad_token="<unused257>", extra_special_tokens=own.special
    )


def processed(folder: Path, family: str, messages: list[dict[str, Any]]) -> dict[str, Tensor]:
    """What transformers' own processor makes of a conversation."""
    own = FAMILIES[family]
    if own.name == "Gemma4Unified":
        images = Gemma4ImageProcessorPil.from_pretrained(folder)
    else:
        images = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    if own.name == "Mistral3":
        return _mistral3_inputs(own, images, messages)
    # That of SmolVLM, which is as Idefics 3's, needs one more package.
    name = "Idefics3" if own.name == "SmolVLM" else own.name.replace("Moe", "")
    kind = getattr(transformers, f"{name}Processor")
    unchecked = {"check_argument_for_proper_class": lambda *args: None}  # its parts for sound and video may be missing
    processor = type(own.name, (kind,), unchecked)(
        image_processor=images, tokenizer=tokenizer(own), chat_template=template(own), **own.processor
    )
    inputs = dict(processor.apply_chat_template(messages, tokenize=True, return_dict=True, return_tensors="pt"))
    return _with_merged_patches(own, inputs) if own.name == "Gemma4Unified" else inputs


def _with_merged_patches(own: ImageFamily, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Inputs in which the patches of one token are one patch, as by an image processor that needs torchvision."""
    side, pool, pixels, places = own.vision["patch_size"], own.vision["pooling_kernel_size"], [], []
    for patches, positions in zip(inputs["pixel_values"], inputs["image_position_ids"], strict=True):
        image = torch.zeros(*((positions.amax(0).flip(0) + 1) * side).tolist(), 3)
        for patch, (column, row) in zip(patches, positions.tolist(), strict=True):
            if row >= 0:
                rows, columns = (slice(index * side, index * side + side) for index in (row, column))
                image[rows, columns] = patch.view(side, side, 3)
        size, cut, where = side * pool, torch.zeros(70, 3 * (side * pool) ** 2), torch.full((70, 2), -1)
        for index in range(image[::size, ::size, 0].numel()):
            row, column = divmod(index, image.shape[1] // size)
            cut[index] = image[row * size :, column * size :][:size, :size].flatten()
            where[index] = torch.tensor([column, row])
        pixels.append(cut)
        places.append(where)
    return inputs | {"pixel_values": torch.stack(pixels), "image_position_ids": torch.stack(places)}


def _mistral3_inputs(own: ImageFamily, processor: Any, messages: list[dict[str, Any]]) -> dict[str, Tensor]:
    """What transformers' processor makes of a conversation, which needs torchvision."""
    text = tokenizer(own).apply_chat_template(messages, chat_template=template(own), tokenize=False)
    parts = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
    side = own.processor["patch_size"] * own.processor["spatial_merge_size"]
    pictures = [part["image"] for part in parts if part["type"] == "image"]
    inputs = dict(processor(pictures, patch_size=side, return_tensors="pt"))
    before, *texts = text.split("[IMG]")
    for (height, width), after in zip(inputs["image_sizes"].tolist(), texts, strict=True):
        row = "[IMG]" * (width // side)
        before += "[IMG_BREAK]".join([row] * (height // side)) + "[IMG_END]" + after
    return inputs | {"input_ids": torch.tensor([tokenizer(own)(before).input_ids])}


def expected(model: Any, inputs: dict[str, Tensor], ids: list[int]) -> Tensor:
    """The log-probabilities of a text that begins with a processed conversation, by transformers: [tokens, vocab]."""
    tokens = torch.tensor([ids])
    others = {name: values for name, values in inputs.items() if name != "attention_mask"}
    kinds = (tokens == IMAGE_ID).int()
    if hasattr(model, "create_masks_for_generate") and "pixel_values" in others:
        # In forward() Gemma 4 without an encoder has other masks than in generate() with a cache of fixed size.
        rows = torch.empty(1, len(ids), model.config.text_config.hidden_size)
        others["attention_mask"] = model.create_masks_for_generate(model.config, rows, None, None, None, kinds)
    with torch.inference_mode():
        logits: Tensor = model(**others | {"input_ids": tokens, "mm_token_type_ids": kinds}).logits
    return logits[0].float().log_softmax(-1)


def _randomise(model: Any) -> None:
    """Change the weights that transformers initialises all alike, or a mistake with them would not show."""
    with torch.no_grad():
        model.lm_head.weight[IMAGE_ID] = 0.0  # it is hardly ever generated then, as it has no image
        for name, values in model.named_parameters():
            if values.dim() == 1:
                values.add_(torch.randn_like(values) / 5)
            if name.endswith(("position_embedding_table", "pos_embedding")):
                values.copy_(torch.randn_like(values) / 3)
            if ".language_model." in name and name.endswith("q_norm.weight"):
                values.mul_(0.2)  # in place of 1 / sqrt(head_dim), or attention amplifies rounding errors
        for name, values in model.named_buffers():
            if name.endswith("layer_scalar"):
                values.fill_(0.3 + torch.rand(1).item())
            elif name.endswith(("put_min", "put_max")):  # between which the values of a linear layer are clipped
                values.fill_(-1.5 if name.endswith("min") else 1.5)
            elif ".std_" in name:
                values.add_(torch.randn_like(values) / 5)
