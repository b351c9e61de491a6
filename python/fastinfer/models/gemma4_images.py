"""Images of Gemma 4: as many tokens as their shape needs, which see each other within the windows of large models."""

from pathlib import Path
from typing import Any

import torch

from fastinfer.errors import UnsupportedModelError
from fastinfer.models.config import ModelConfig
from fastinfer.models.image_features import FeatureFamily
from fastinfer.models.image_modules import check_equal, read_weights
from fastinfer.models.image_tokens import EncodedImage, ImageLayout

# What an image's tokens begin and end with, and the token itself, which the chat template writes.
BEGIN, END, TOKEN = "<|image>", "<image|>", "<|image|>"


class Gemma4Family(FeatureFamily):
    """Properties of images in Gemma 4."""

    placeholder = TOKEN
    inputs = "pixel_values", "image_position_ids"

    def check(self, path: Path, config: ModelConfig, fields: Any, processor: Any) -> None:
        for name in ("patch_size", "pooling_kernel_size"):
            expected = getattr(fields.vision_config, name)
            check_equal(path, f"{name} of the image processor", getattr(processor, name), expected)
        num_shared = fields.text_config.num_kv_shared_layers
        if _is_bidirectional(fields) and num_shared:
            raise UnsupportedModelError(
                f"{path.name}: images need num_kv_shared_layers of 0 with use_bidirectional_attention, got {num_shared}"
            )

    def layout(self, fields: Any, processor: Any, height: int, width: int) -> ImageLayout:
        from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size

        side, pool = processor.patch_size, processor.pooling_kernel_size
        scaled = get_aspect_ratio_preserving_size(height, width, side, processor.max_soft_tokens * pool**2, pool)
        rows, columns = (length // (side * pool) for length in scaled)
        return ImageLayout(f"{BEGIN}{TOKEN}{END}", (rows * columns,))

    def encoded(self, fields: Any, features: torch.Tensor, digest: bytes) -> EncodedImage:
        return EncodedImage(
            features=features,
            digest=digest,
            num_positions=features.shape[1],
            is_bidirectional=_is_bidirectional(fields),
            in_windows_alone=True,
            layer_token=fields.text_config.pad_token_id,
        )


class Gemma4UnifiedFamily(Gemma4Family):
    """Properties of images in Gemma 4 without an encoder, which reads the pixels of one token as one patch."""

    def read_processor(self, path: Path) -> Any:
        # The model's own needs torchvision, and differs in the size of patches.
        from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

        return Gemma4ImageProcessorPil.from_pretrained(path, local_files_only=True)

    def process(self, processor: Any, image: Any) -> dict[str, Any]:
        inputs, side, pool = super().process(processor, image), processor.patch_size, processor.pooling_kernel_size
        [patches], [positions] = inputs["pixel_values"], inputs["image_position_ids"]
        columns, rows = ((positions.amax(0) + 1) // pool).tolist()
        patches = patches[: rows * columns * pool**2]  # without padding
        squares = patches.view(rows, pool, columns, pool, side, side, -1).permute(0, 2, 1, 4, 3, 5, 6)
        places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(1)
        return {"pixel_values": squares.flatten(2).flatten(0, 1)[None], "image_position_ids": places[None]}

    def read_weights(self, path: Path, model: Any, device: str) -> None:
        vision = model.embed_vision
        projection, vision.multimodal_embedder = vision.multimodal_embedder, None
        read_weights(path, vision, ("model.vision_embedder.",), device)
        vision.multimodal_embedder = read_weights(path, projection, ("model.embed_vision.",), device)


def _is_bidirectional(fields: Any) -> bool:
    return bool(fields.text_config.use_bidirectional_attention == "vision")
