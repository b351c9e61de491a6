"""Image encoders of Qwen2.5-VL, Qwen3-VL and Qwen3.5 in GGUF files."""

import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastinfer.errors import GGUFFormatError
from fastinfer.formats.gguf import GGUFFile
from fastinfer.models.config import ModelConfig
from fastinfer.models.image_modules import make_module
from fastinfer.models.mmproj_fields import MmprojFields, size
from fastinfer.models.mmproj_tensors import MmprojTensors, has_swapped_mlp, mlp_width, stacked
from fastinfer.models.qwen_images import QWEN2_5_VL, QWEN3_5, QWEN3_VL, QwenFamily, QwenImages, rotary_axes

TOKEN = QWEN2_5_VL.placeholder  # of the others, too
TIMES = 2  # frames that become one patch: an image is there twice
# Of Qwen2.5-VL, in files that do not say it: side of the windows of attention, in pixels.
WINDOW_SIZE = 112

_LAYER = re.compile(r"blocks\.(\d+)\.(.+)\.(weight|bias)")
_DEEPSTACK = re.compile(r"deepstack_merger_list\.(\d+)\.(.+)\.(weight|bias)")
_NAMES = {
    "patch_embed.proj": "v.patch_embd",
    "pos_embed": "v.position_embd",
    "merger.norm": "v.post_ln",
    "merger.ln_q": "v.post_ln",
    "merger.linear_fc1": "mm.0",
    "merger.linear_fc2": "mm.2",
    "merger.mlp.0": "mm.0",
    "merger.mlp.2": "mm.2",
}
_LAYER_NAMES = {
    "norm1": "ln1",
    "norm2": "ln2",
    "attn.qkv": "attn_qkv",
    "attn.proj": "attn_out",
    "mlp.linear_fc1": "ffn_up",
    "mlp.linear_fc2": "ffn_down",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_DEEPSTACK_NAMES = {"norm": "norm", "linear_fc1": "fc1", "linear_fc2": "fc2"}
_SWAPPED = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}


@dataclass(frozen=True)
class QwenKind:
    """Properties of a model's images that its files do not say.

    Attributes:
        family: how the model has images.
        pixels: smallest and largest number of pixels of a scaled image, as published with the model.
    """

    family: QwenFamily
    pixels: tuple[int, int]


# By architecture of the model's file.
KINDS = {
    "qwen2vl": QwenKind(QWEN2_5_VL, (3136, 12845056)),
    "qwen3vl": QwenKind(QWEN3_VL, (65536, 16777216)),
    "qwen3vlmoe": QwenKind(QWEN3_VL, (65536, 16777216)),
    "qwen35": QwenKind(QWEN3_5, (65536, 16777216)),
    "qwen35moe": QwenKind(QWEN3_5, (65536, 16777216)),
}


@dataclass(frozen=True)
class QwenEncoder:
    """An image encoder, not yet loaded.

    Attributes:
        fields: what the file's metadata say.
        tensors: the file's tensors.
        architecture: architecture of the model.
        merge_size: side of the square of patches that become one token.
        pixels: smallest and largest number of pixels of a scaled image.
        window_size, full_layers: side of the windows of Qwen2.5-VL in pixels, and layers without windows.
        deepstack_layers: layers whose outputs the decoder reads, too.
        sections: numbers of frequencies of time, rows and columns in the decoder.
        token_id: token that stands for an image.
        marker: what stands for an image in a conversation.
    """

    fields: MmprojFields
    tensors: MmprojTensors
    architecture: str
    merge_size: int
    pixels: tuple[int, int]
    window_size: int
    full_layers: list[int]
    deepstack_layers: list[int]
    sections: list[int]
    token_id: int
    marker: str = f"<|vision_start|>{TOKEN}<|vision_end|>"

    @classmethod
    def of(cls, file: GGUFFile, fields: MmprojFields, model: GGUFFile, config: ModelConfig) -> "QwenEncoder":
        """Describe the encoder of a file for a model.

        Raises:
            GGUFFormatError, CheckpointFormatError: the file's sizes are wrong, the files do not belong together, or the
                model has no token for images.
        """
        architecture, tokens = config.architecture, model.get("tokenizer.ggml.tokens", list)
        if TOKEN not in tokens:
            raise GGUFFormatError(f"{model.path}: images need a token {TOKEN!r}, got a vocabulary without it")
        kind, tensors, merge_size = KINDS[architecture], MmprojTensors(file), size(file, "spatial_merge_size", 2)
        if fields.width // fields.num_heads % 4:  # half of a head is rotated by rows, in pairs, half by columns
            raise GGUFFormatError(
                f"{file.path}: expected heads of a multiple of 4 elements, got {fields.width // fields.num_heads}"
            )
        joined_width = fields.width * merge_size**2
        tensors.check_shape("mm.0.weight", (joined_width, joined_width))
        if architecture != "qwen2vl":
            count = tensors.shape("v.position_embd.weight")[0]
            tensors.check_shape("v.position_embd.weight", (math.isqrt(count) ** 2, fields.width))
        # Every so many layers one has no windows; with 0, none has windows.
        period = file.get("clip.vision.n_wa_pattern", int, minimum=0) if architecture == "qwen2vl" else 0
        return cls(
            fields=fields,
            tensors=tensors,
            architecture=architecture,
            merge_size=merge_size,
            pixels=(size(file, "image_min_pixels", kind.pixels[0]), size(file, "image_max_pixels", kind.pixels[1])),
            window_size=size(file, "window_size", WINDOW_SIZE),
            full_layers=list(range(max(period - 1, 0), fields.num_layers, period or 1)),
            deepstack_layers=_deepstack_layers(file, fields.num_layers, model, architecture),
            sections=_sections(model, architecture, kind.family),
            token_id=tokens.index(TOKEN),
        )

    def load(self, config: ModelConfig, dtype: torch.dtype, device: str) -> QwenImages:
        """Load the modules."""
        from transformers import Qwen2VLImageProcessorPil

        fields, family = self.fields, KINDS[self.architecture].family
        is_swapped = has_swapped_mlp(self.tensors, fields.width)
        module = make_module(self._vision_config(config), dtype)
        return QwenImages(
            module=self.tensors.load(module, lambda name: self._read(name, is_swapped), device),
            processor=Qwen2VLImageProcessorPil(
                size={"shortest_edge": self.pixels[0], "longest_edge": self.pixels[1]},
                patch_size=fields.patch_size,
                merge_size=self.merge_size,
                temporal_patch_size=TIMES,
                image_mean=fields.mean,
                image_std=fields.std,
            ),
            placeholder=TOKEN,
            token_id=self.token_id,
            merge_size=self.merge_size,
            rotary_axes=rotary_axes(self.tensors.name, config.rotary_dim // 2, self.sections, family.interleaved),
        )

    def _vision_config(self, config: ModelConfig) -> Any:
        """Return the configuration of transformers' module."""
        from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
        from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig
        from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig

        sizes: dict[str, Any] = {
            "depth": self.fields.num_layers,
            "hidden_size": self.fields.width,
            "intermediate_size": mlp_width(self.tensors),
            "num_heads": self.fields.num_heads,
            "patch_size": self.fields.patch_size,
            "spatial_merge_size": self.merge_size,
            "temporal_patch_size": TIMES,
            "out_hidden_size": config.hidden_size,
        }
        if self.architecture == "qwen2vl":
            return Qwen2_5_VLVisionConfig(**sizes, window_size=self.window_size, fullatt_block_indexes=self.full_layers)
        sizes["num_position_embeddings"] = self.tensors.shape("v.position_embd.weight")[0]
        if self.architecture in ("qwen35", "qwen35moe"):
            return Qwen3_5VisionConfig(**sizes)
        return Qwen3VLVisionConfig(**sizes, deepstack_visual_indexes=self.deepstack_layers)

    def _read(self, name: str, is_swapped: bool) -> Tensor:
        """Read a tensor by its name in the module."""
        if match := _LAYER.fullmatch(name):
            block, part, kind = f"v.blk.{match[1]}", _LAYER_NAMES[match[2]], match[3]
            part = _SWAPPED.get(part, part) if is_swapped else part
            if part == "attn_qkv" and f"{block}.{part}.{kind}" not in self.tensors:
                return stacked(self.tensors, [f"{block}.attn_{each}.{kind}" for each in "qkv"], dim=0).flatten(0, 1)
            return self.tensors.get(f"{block}.{part}.{kind}")
        if match := _DEEPSTACK.fullmatch(name):
            layer = self.deepstack_layers[int(match[1])]
            return self.tensors.get(f"v.deepstack.{layer}.{_DEEPSTACK_NAMES[match[2]]}.{match[3]}")
        module, _, kind = name.rpartition(".")
        stored = f"{_NAMES[module]}.{kind}"
        if name == "patch_embed.proj.weight":  # a filter for each frame
            return stacked(self.tensors, [stored, f"{stored}.1"], dim=2)
        return self.tensors.get(stored)


def qwen_width(tensors: MmprojTensors) -> tuple[str, int]:
    """Return the name of the last tensor, and its number of outputs."""
    name = "mm.2.weight"
    return name, tensors.shape(name)[0]


def _deepstack_layers(file: GGUFFile, num_layers: int, model: GGUFFile, architecture: str) -> list[int]:
    """Return the layers whose outputs the decoder reads."""
    key = "clip.vision.is_deepstack_layers"
    flags = file.get(key, np.ndarray, np.zeros(num_layers, np.bool_))
    if flags.dtype.kind != "b" or len(flags) != num_layers:
        raise GGUFFormatError(
            f"{file.path}: metadata key {key!r}: expected {num_layers} booleans, got {len(flags)} of {flags.dtype}"
        )
    layers = [int(layer) for layer in np.flatnonzero(flags)]
    # Older files of Qwen3-VL do not say the number; Qwen3.5 has none.
    known = len(layers) if architecture in ("qwen3vl", "qwen3vlmoe") else 0
    expected = model.get(f"{architecture}.n_deepstack_layers", int, known)
    if len(layers) != expected:
        raise GGUFFormatError(
            f"{file.path}: expected {expected} deepstack layers, as many as {model.path.name} reads, got {len(layers)}"
        )
    return layers


def _sections(model: GGUFFile, architecture: str, family: QwenFamily) -> list[int]:
    """Return how many frequencies of the decoder rotate by time, row and column."""
    values = model.get(f"{architecture}.rope.dimension_sections", np.ndarray, np.array(family.sections))
    return [int(value) for value in values[:3]]
