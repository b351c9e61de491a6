"""Images of Idefics 3 and SmolVLM: square tiles with a name before each, and the whole image after them."""

from pathlib import Path
from typing import Any

from fastinfer.models.config import ModelConfig
from fastinfer.models.image_features import FeatureFamily
from fastinfer.models.image_modules import check_equal
from fastinfer.models.image_tokens import ImageLayout

# The image's token, which the chat template writes, what stands around tiles, and the name of the whole image.
TOKEN, AROUND, WHOLE = "<image>", "<fake_token_around_image>", "<global-img>"


class IdeficsFamily(FeatureFamily):
    """Properties of images in Idefics 3."""

    placeholder = TOKEN
    inputs = "pixel_values", "pixel_attention_mask"

    def check(self, path: Path, config: ModelConfig, fields: Any, processor: Any) -> None:
        side = processor.max_image_size["longest_edge"]
        check_equal(path, "max_image_size of the image processor", side, fields.vision_config.image_size)
        for name in ("do_resize", "do_pad"):
            check_equal(path, f"{name} of the image processor", getattr(processor, name), True)

    def layout(self, fields: Any, processor: Any, height: int, width: int) -> ImageLayout:
        _, rows, columns = processor.get_number_of_image_patches(height, width)
        tiles = [
            "".join(f"{AROUND}<row_{row}_col_{column}>{TOKEN}" for column in range(1, columns + 1)) + "\n"
            for row in range(1, rows + 1)
        ]
        text = "".join([*tiles, "\n"] if tiles else []) + f"{AROUND}{WHOLE}{TOKEN}{AROUND}"
        vision = fields.vision_config
        count = (vision.image_size // vision.patch_size) ** 2 // fields.scale_factor**2
        return ImageLayout(text, (count,) * (rows * columns + 1))
