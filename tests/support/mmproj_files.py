"""Writes a model of text and images as two GGUF files, as llama.cpp's converter does."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from tokenizers import pre_tokenizers
from torch import Tensor

from support.gguf_model_file import write_gguf
from support.image_models import GEMMA_NAMES, GEMMA_TEMPLATE, NAMES, PROCESSOR, TEMPLATE

CONTROL = 3
PROJECTORS = {"gemma3": "gemma3", "qwen2_5_vl": "qwen2.5vl_merger"}  # the others have that of Qwen3-VL
# Parts of the mergers that the table of names does not have.
MERGER = {
    "merger.norm": "v.post_ln",
    "merger.ln_q": "v.post_ln",
    "merger.linear_fc1": "mm.0",
    "merger.linear_fc2": "mm.2",
}


class TextPart:
    """The text part of a model, as :func:`support.gguf_model_file.write_gguf` takes a model."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.config = copy.deepcopy(model.config.get_text_config())
        self.config.tie_word_embeddings = model.config.tie_word_embeddings

    def state_dict(self) -> dict[str, Tensor]:
        tensors = self.model.state_dict()
        names = {name: name.replace("model.language_model.", "model.", 1) for name in tensors}
        return {new: tensors[name] for name, new in names.items() if name != new or name == "lm_head.weight"}


def write_model(path: Path, model: Any, template: str | None = None, tokens: dict[int, str] | None = None) -> None:
    """Write the text part with its tokenizer, that of :func:`support.image_models.save_model`.

    Args:
        path: path of the file.
        model: model of transformers.
        template: chat template; ``None`` for that of the model's folder.
        tokens: spellings of tokens by id, in place of those of the folder.
    """
    is_gemma = model.config.model_type == "gemma3"
    vision = model.config.vision_config
    names = (GEMMA_NAMES if is_gemma else NAMES) | (tokens or {})
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    # Without a merge a file is malformed; this one's token occurs in no text.
    spellings = [*letters, *(names.get(index, f"<unused{index}>") for index in range(256, 303)), 2 * letters[0]]

    def more(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(spellings)
        writer.add_token_types([1] * 256 + [CONTROL] * 47 + [1])
        writer.add_token_merges([f"{letters[0]} {letters[0]}"])
        writer.add_eos_token_id(256)
        writer.add_pad_token_id(257)
        writer.add_chat_template(template or (GEMMA_TEMPLATE if is_gemma else TEMPLATE))
        if deepstack := getattr(vision, "deepstack_visual_indexes", None):
            writer.add_uint32(f"{writer.arch}.n_deepstack_layers", len(deepstack))

    write_gguf(path, TextPart(model), more=more)


def write_mmproj(
    path: Path,
    model: Any,
    *,
    kind: Kind = Kind.F32,
    keys: dict[str, Any] | None = None,
    is_old: bool = False,
    splits_qkv: bool | None = None,
    without: str = "",
    other: dict[str, np.ndarray] | None = None,
) -> None:
    """Write the encoder.

    Args:
        path: path of the file.
        model: model of transformers.
        kind: type of the matrices; see :func:`rounded`.
        keys: other values of metadata; ``None`` as a value leaves a key out.
        is_old: whether the matrices of the MLPs have each other's name.
        splits_qkv: whether queries, keys and values are tensors of their own; ``None`` for what the converter does.
        without: name of a tensor to leave out.
        other: tensors in place of the model's, or further ones.
    """
    config, vision = model.config, model.config.vision_config
    writer = gguf.GGUFWriter(path, "clip")
    for name, value in (_keys(config, vision) | (keys or {})).items():
        if value is None:
            continue
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif name != "general.architecture":
            writer.add_string(name, value)
    splits = config.model_type == "qwen2_5_vl" if splits_qkv is None else splits_qkv
    for name, values in _tensors(model, splits):
        if is_old and ".ffn_" in name and ".ffn_gate" not in name:
            swapped = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
            part = name.split(".")[3]
            name = name.replace(part, swapped[part])
        if name == without or name in (other or {}):
            continue
        stored = _stored_kind(name, values, kind)
        data = gguf.quantize(values.contiguous().numpy(), stored)
        writer.add_tensor(name, data, raw_dtype=stored)
    for name, values in (other or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def rounded(kind: Kind) -> Any:
    """Return a function that rounds an encoder's weights to those that a file of this type has."""

    def prepare(model: Any) -> None:
        parameters = dict(model.named_parameters())
        for name, values in parameters.items():
            if ".visual." in name or ".vision_tower." in name or ".multi_modal_projector." in name:
                stored = _stored_kind(_short(name), values, kind)
                values.copy_(torch.from_numpy(gguf.dequantize(gguf.quantize(values.numpy(), stored), stored)))

    return prepare


def _stored_kind(name: str, values: Tensor, kind: Kind) -> Kind:
    if kind in (Kind.F32, Kind.F16, Kind.BF16):
        return kind if values.dim() > 1 and "position_embd" not in name and "pos_embed" not in name else Kind.F32
    is_matrix = values.dim() == 2 and "position_emb" not in name and "pos_embed" not in name
    if "input_projection" in name:
        return Kind.F16
    return kind if is_matrix and values.shape[-1] % 32 == 0 else Kind.F32


def _short(name: str) -> str:
    return name.removeprefix("model.")


def _keys(config: Any, vision: Any) -> dict[str, Any]:
    is_gemma = config.model_type == "gemma3"
    kind = PROJECTORS.get(config.model_type, "qwen3vl_merger")
    keys = {
        "general.type": "mmproj",
        "clip.has_vision_encoder": True,
        "clip.projector_type": kind,
        "clip.vision.projection_dim": config.get_text_config().hidden_size,
        "clip.vision.image_size": vision.image_size if is_gemma else 24,
        "clip.vision.patch_size": vision.patch_size,
        "clip.vision.embedding_length": vision.hidden_size,
        "clip.vision.feed_forward_length": vision.intermediate_size,
        "clip.vision.block_count": vision.num_hidden_layers if is_gemma else vision.depth,
        "clip.vision.attention.head_count": vision.num_attention_heads if is_gemma else vision.num_heads,
        "clip.vision.attention.layer_norm_epsilon": 1e-6,
        "clip.vision.image_mean": [0.5, 0.5, 0.5] if is_gemma else PROCESSOR["image_mean"],
        "clip.vision.image_std": [0.5, 0.5, 0.5] if is_gemma else PROCESSOR["image_std"],
        "clip.use_silu" if kind.startswith("qwen2.5") else "clip.use_gelu": True,
    }
    if is_gemma:
        side = int(config.mm_tokens_per_image**0.5)
        return keys | {"clip.vision.projector.scale_factor": vision.image_size // vision.patch_size // side}
    # The converter does not write the limits of Qwen's models; without them they would be those of the published ones.
    sizes = PROCESSOR["size"]
    keys |= {
        "clip.vision.image_min_pixels": sizes["shortest_edge"],
        "clip.vision.image_max_pixels": sizes["longest_edge"],
    }
    if kind == "qwen2.5vl_merger":
        pattern = {"clip.vision.n_wa_pattern": vision.fullatt_block_indexes[0] + 1}
        return keys | pattern | {"clip.vision.window_size": vision.window_size}
    deepstack = getattr(vision, "deepstack_visual_indexes", None) or []
    keys["clip.vision.spatial_merge_size"] = vision.spatial_merge_size
    return keys | {"clip.vision.is_deepstack_layers": [layer in deepstack for layer in range(vision.depth)]}


def _tensors(model: Any, splits_qkv: bool) -> Iterator[tuple[str, Tensor]]:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 8)
    deepstack = getattr(model.config.vision_config, "deepstack_visual_indexes", None) or []
    for name, values in model.state_dict().items():
        short = _short(name)
        if short.startswith("vision_tower.") and ".head." not in short:
            short = short.replace("vision_tower.", "vision_tower.vision_model.")
        elif short.startswith("multi_modal_projector."):
            short = short.replace("_weight", ".weight")
            values = values + 1 if "soft_emb_norm" in short else values
        elif not short.startswith("visual."):
            continue
        module, _, end = short.rpartition(".")
        if ".qkv." in short and splits_qkv:
            for part, rows in zip("qkv", values.chunk(3), strict=True):
                yield f"v.blk.{short.split('.')[2]}.attn_{part}.{end}", rows
        elif ".deepstack_merger_list." in short:
            _, _, index, part, _ = short.split(".")
            yield f"v.deepstack.{deepstack[int(index)]}.{part.removeprefix('linear_')}.{end}", values
        elif short == "visual.patch_embed.proj.weight":
            yield "v.patch_embd.weight", values[:, :, 0]
            yield "v.patch_embd.weight.1", values[:, :, 1]
        elif (stored := MERGER.get(module.removeprefix("visual."))) is not None:
            yield f"{stored}.{end}", values
        else:
            stored = names.get_name(short, try_suffixes=(".weight", ".bias"))
            assert stored is not None, short
            yield stored, values
