"""Images of InternVL: square tiles and the whole image, whose tokens follow each other."""

from pathlib import Path
from types import MappingProxyType
from typing import Any

from fastinfer.models.config import ModelConfig
from fastinfer.models.image_features import FeatureFamily
from fastinfer.models.image_modules import check_equal
from fastinfer.models.image_tokens import ImageLayout

# What an image's tokens begin and end with, and the token itself, which the chat template writes.
BEGIN, END, TOKEN = "<img>", "</img>", "<IMG_CONTEXT>"


class InternFamily(FeatureFamily):
    """Properties of images in InternVL."""

    placeholder = TOKEN
    inputs = ("pixel_values",)
    # The processor of text and images says so, whatever the file of that of images says.
    options = MappingProxyType({"crop_to_patches": True})

    def check(self, path: Path, config: ModelConfig, fields: Any, processor: Any) -> None:
        height, width = fields.vision_config.image_size
        got = {name: processor.size[name] for name in ("height", "width")}
        check_equal(path, "size of the image processor", got, {"height": height, "width": width})

    def layout(self, fields: Any, processor: Any, height: int, width: int) -> ImageLayout:
        vision = fields.vision_config
        rows, columns = (
            int(size // side * fields.downsample_ratio)
            for size, side in zip(vision.image_size, vision.patch_size, strict=True)
        )
        num_tiles = processor.get_number_of_image_patches(height, width, dict(self.options))
        return ImageLayout(f"{BEGIN}{TOKEN}{END}", (num_tiles * rows * columns,))
