"""Images of Qwen-VL, Qwen3.5 and GLM-4.xV: squares of patches, rotated by row and column."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastinfer.errors import CheckpointFormatError
from fastinfer.models.config import ModelConfig
from fastinfer.models.image_modules import check_equal, make_without_text, read_processor, read_weights
from fastinfer.models.image_tokens import EncodedImage, ImageLayout


@dataclass(frozen=True)
class QwenFamily:
    """Properties of images in one architecture.

    Attributes:
        interleaved: whether the frequencies of rows and columns alternate with those of time, instead of following
            them.
        sections: numbers of frequencies of time, rows and columns in files that do not say them.
        placeholder: what the chat template writes for an image, which is the image's token.
        width: name of the size of the encoder's rows.
    """

    interleaved: bool
    sections: tuple[int, int, int]
    placeholder: str = "<|image_pad|>"
    width: str = "out_hidden_size"

    def read(self, path: Path, config: ModelConfig, dtype: torch.dtype, device: str) -> "QwenImages":
        """Load the modules of a folder."""
        from transformers import AutoConfig

        fields = AutoConfig.from_pretrained(path, local_files_only=True)
        vision, processor = fields.vision_config, read_processor(path)
        check_equal(path, "patch_size of the image processor", processor.patch_size, vision.patch_size)
        check_equal(path, "merge_size of the image processor", processor.merge_size, vision.spatial_merge_size)
        times = vision.temporal_patch_size
        check_equal(path, "temporal_patch_size of the image processor", processor.temporal_patch_size, times)
        check_equal(path, f"vision_config.{self.width}", getattr(vision, self.width), config.hidden_size)
        rope = getattr(fields.get_text_config(), "rope_parameters", None) or {}
        sections = rope.get("mrope_section") or self.sections
        return QwenImages(
            module=read_weights(path, make_without_text(fields, dtype).visual, ("model.visual.", "visual."), device),
            processor=processor,
            placeholder=self.placeholder,
            token_id=fields.image_token_id,
            merge_size=vision.spatial_merge_size,
            rotary_axes=rotary_axes(path.name, config.rotary_dim // 2, sections, self.interleaved),
        )


@dataclass(frozen=True, eq=False)
class QwenImages:
    """The loaded modules, see :class:`fastinfer.models.image_modules.ImageModules`.

    Attributes:
        module: from the pixels of patches, and their grid, to rows of the decoder's width.
        processor: from images to the pixels of patches.
        placeholder: what the chat template writes, which is the image's token.
        token_id: this token.
        merge_size: side of the square of patches that become one token.
        rotary_axes: [rotary_dim / 2] int64; whether a pair of elements is rotated by time (0), row (1) or column (2).
    """

    module: Any
    processor: Any
    placeholder: str
    token_id: int
    merge_size: int
    rotary_axes: Tensor

    def layout(self, image: Any) -> ImageLayout:
        patches: int = self.processor.get_number_of_image_patches(image.height, image.width)
        return ImageLayout(self.placeholder, (patches // self.merge_size**2,))

    def encode(self, image: Any, digest: bytes) -> EncodedImage:
        inputs = self.processor(images=[image], return_tensors="pt")
        grid, weight = inputs["image_grid_thw"], next(self.module.parameters())
        output = self.module(inputs["pixel_values"].to(weight.device, weight.dtype), grid_thw=grid.to(weight.device))
        features = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
        rows, columns = (grid[0, 1:] // self.merge_size).tolist()
        places = torch.cartesian_prod(torch.arange(1), torch.arange(rows), torch.arange(columns))
        return EncodedImage(
            features=torch.stack(features).cpu(),
            digest=digest,
            num_positions=max(rows, columns),
            rotary_offsets=places[:, self.rotary_axes],
        )


def rotary_axes(name: str, count: int, sections: Any, interleaved: bool) -> Tensor:
    """Return by which of time, row and column each frequency rotates.

    Args:
        name: name of the file or folder, for messages.
        count: number of frequencies.
        sections: how many of them rotate by each.
        interleaved: see :class:`QwenFamily`.

    Raises:
        CheckpointFormatError: the sections are no three numbers that add up to the count.
    """
    is_list = isinstance(sections, Sequence) and len(sections) == 3 and all(isinstance(n, int) for n in sections)
    if not is_list or min(sections) < 0 or sum(sections) != count:
        raise CheckpointFormatError(
            f"{name}: mrope_section must be three numbers that add up to {count}, got {sections!r:.80}"
        )
    if not interleaved:
        return torch.arange(3).repeat_interleave(torch.tensor(sections))
    axes = torch.zeros(count, dtype=torch.int64)
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = axis
    return axes


QWEN2_VL = QwenFamily(False, (16, 24, 24), width="hidden_size")
QWEN2_5_VL = QwenFamily(False, (16, 24, 24))
QWEN3_VL = QwenFamily(True, (24, 20, 20))
QWEN3_5 = QwenFamily(True, (11, 11, 10))
GLM4V = QwenFamily(False, (8, 12, 12), placeholder="<|image|>")
