"""Images of Gemma 3: squares of fixed size, whose tokens see each other in both directions."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fastinfer.errors import UnsupportedModelError
from fastinfer.models.config import ModelConfig
from fastinfer.models.image_modules import check_equal, make_module, read_processor, read_weights
from fastinfer.models.image_tokens import EncodedImage, ImageLayout

# What the chat template writes for an image, what its tokens begin and end with, and the token itself.
BEGIN, END, TOKEN = "<start_of_image>", "<end_of_image>", "<image_soft_token>"


class GemmaFamily:
    """Properties of images in Gemma 3."""

    def read(self, path: Path, config: ModelConfig, dtype: torch.dtype, device: str) -> "GemmaImages":
        """Load the modules of a folder."""
        from transformers import AutoConfig
        from transformers.models.gemma3.modeling_gemma3 import Gemma3MultiModalProjector

        fields = AutoConfig.from_pretrained(path, local_files_only=True)
        count, vision, processor = fields.mm_tokens_per_image, fields.vision_config, read_processor(path)
        size = {"height": vision.image_size, "width": vision.image_size}
        got = {name: processor.size[name] for name in size}
        check_equal(path, "size of the image processor", got, size)
        check_equal(path, "text_config.hidden_size", fields.text_config.hidden_size, config.hidden_size)
        if getattr(processor, "do_pan_and_scan", False):
            raise UnsupportedModelError(f"{path.name}: do_pan_and_scan of the image processor must be false, got true")
        check_windows(path.name, config, count)
        vision.vision_use_head = False  # the decoder reads the patches alone
        tower = make_module(vision, dtype)
        owners = "model.vision_tower.", "vision_tower."
        towers = (*(f"{owner}vision_model." for owner in owners), *owners)
        projectors = ("model.multi_modal_projector.", "multi_modal_projector.")
        return GemmaImages(
            tower=read_weights(path, tower, towers, device),
            projector=read_weights(path, Gemma3MultiModalProjector(fields).to(dtype), projectors, device),
            processor=processor,
            token_id=fields.image_token_id,
            count=count,
        )


@dataclass(frozen=True, eq=False)
class GemmaImages:
    """The loaded modules, see :class:`fastinfer.models.image_modules.ImageModules`.

    Attributes:
        tower: from pixels to rows of patches.
        projector: from these to the rows of the decoder.
        processor: from images to pixels.
        token_id: the token that stands for an image.
        count: number of tokens of an image.
        token: spelling of the token that stands for an image.
    """

    tower: Any
    projector: Any
    processor: Any
    token_id: int
    count: int
    token: str = TOKEN

    @property
    def placeholder(self) -> str:
        return BEGIN

    def layout(self, image: Any) -> ImageLayout:
        return ImageLayout(f"\n\n{BEGIN}{self.token}{END}\n\n", (self.count,))

    def encode(self, image: Any, digest: bytes) -> EncodedImage:
        inputs, weight = self.processor(images=[image], return_tensors="pt"), next(self.tower.parameters())
        pixels = inputs["pixel_values"].to(weight.device, weight.dtype)
        features = self.projector(self.tower(pixel_values=pixels).last_hidden_state)
        return EncodedImage(features=features.cpu(), digest=digest, num_positions=self.count, is_bidirectional=True)


def check_windows(name: str, config: ModelConfig, count: int) -> None:
    """Check that attention can see a whole image in both directions.

    Args:
        name: name of the file or folder, for messages.
        config: configuration of the decoder.
        count: number of tokens of an image.

    Raises:
        UnsupportedModelError: a window is shorter than an image, or attention has a softcap or sinks.
    """
    window = min((window for window in config.windows if window), default=count)
    if window < count or config.attention_softcap or config.attention_sinks:
        raise UnsupportedModelError(
            f"{name}: images need windows of at least {count} tokens and neither softcap nor sinks, "
            f"got a window of {window} and a softcap of {config.attention_softcap}"
        )
