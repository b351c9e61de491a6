"""Images of Mistral 3 and Ministral 3: rows of squares of patches, each of which ends with a token of text."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastinfer.models.config import ModelConfig
from fastinfer.models.image_features import FeatureFamily
from fastinfer.models.image_modules import check_equal
from fastinfer.models.image_tokens import ImageLayout

# The token of an image, which the chat template writes, and what a row and the last one end with.
TOKEN, BREAK, END = "[IMG]", "[IMG_BREAK]", "[IMG_END]"


class MistralFamily(FeatureFamily):
    """Properties of images in Mistral 3."""

    placeholder = TOKEN
    inputs = "pixel_values", "image_sizes"

    def check(self, path: Path, config: ModelConfig, fields: Any, processor: Any) -> None:
        check_equal(path, "do_resize of the image processor", processor.do_resize, True)
        # The processor of text and images sets the size of patches, so the file of that of images may have another one.
        side = fields.vision_config.patch_size * fields.spatial_merge_size
        processor.patch_size = {"height": side, "width": side}

    def rows(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        side = model.config.vision_config.patch_size * model.config.spatial_merge_size
        is_single = int(inputs["image_sizes"].prod()) == side**2
        if is_single:  # the model takes a single row for a dimension too many, so it gets two
            inputs = {name: torch.cat([values, values]) for name, values in inputs.items()}
        rows = super().rows(model, inputs)
        return rows[:1] if is_single else rows

    def layout(self, fields: Any, processor: Any, height: int, width: int) -> ImageLayout:
        from transformers.image_utils import ChannelDimension
        from transformers.models.pixtral.image_processing_pil_pixtral import get_resize_output_image_size

        size, side = processor.size, processor.patch_size["height"]
        longest = size.get("longest_edge") or (size["height"], size["width"])
        image = np.empty((height, width, 3), np.uint8)
        scaled = get_resize_output_image_size(image, longest, side, ChannelDimension.LAST)
        rows, columns = (length // side for length in scaled)
        if not rows * columns:
            raise ValueError(f"the longer side must be at most {np.max(longest)} times the shorter one")
        return ImageLayout(BREAK.join([TOKEN] * rows) + END, (columns,) * rows)
