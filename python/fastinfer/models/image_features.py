"""Base of the families whose images transformers' own model turns into rows, given what its processor makes of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from fastinfer.errors import UnsupportedModelError
from fastinfer.models.config import ModelConfig
from fastinfer.models.image_modules import check_equal, make_without_text, read_processor, read_weights
from fastinfer.models.image_tokens import EncodedImage, ImageLayout


class FeatureFamily:
    """Properties of images in one architecture.

    Attributes:
        placeholder: what the chat template writes for an image.
        inputs: names of the processor's outputs that the model reads.
        options: arguments of the processor.
    """

    placeholder: str
    inputs: tuple[str, ...]
    options: Mapping[str, Any] = MappingProxyType({})

    def check(self, path: Path, config: ModelConfig, fields: Any, processor: Any) -> None:
        """Refuse settings that contradict each other, or are not implemented.

        Args:
            path: folder of the checkpoint.
            config: configuration of the decoder.
            fields: configuration of the whole model.
            processor: from images to pixels.

        Raises:
            UnsupportedModelError, CheckpointFormatError: there is one.
        """

    def layout(self, fields: Any, processor: Any, height: int, width: int) -> ImageLayout:
        """Return what stands for an image of this size in a prompt.

        Raises:
            ValueError: the size is not supported.
        """
        raise NotImplementedError

    def read_processor(self, path: Path) -> Any:
        """Return the processor from images to pixels."""
        return read_processor(path)

    def process(self, processor: Any, image: Any) -> dict[str, Any]:
        """Return what the model reads of an image, by name."""
        outputs = processor(images=[image], return_tensors="pt", **self.options)
        return {name: outputs[name] for name in self.inputs}

    def encoded(self, fields: Any, features: torch.Tensor, digest: bytes) -> EncodedImage:
        """Return an image with these rows, [1, tokens, hidden]."""
        return EncodedImage(features, digest, features.shape[1])

    def rows(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        """Return the rows of an image, [tokens, hidden]."""
        return torch.cat([part.flatten(0, -2) for part in model.get_image_features(**inputs).pooler_output])

    def prefixes(self, module: str) -> tuple[str, ...]:
        """Return how the names of a module's tensors may begin in files of several ages."""
        owners = f"model.{module}.", f"{module}."
        return (*(f"{owner}vision_model." for owner in owners), *owners)

    def read_weights(self, path: Path, model: Any, device: str) -> None:
        """Read the weights of a model without its decoder from a folder."""
        for name, module in model.named_children():
            read_weights(path, module, self.prefixes(name), device)

    def read(self, path: Path, config: ModelConfig, dtype: torch.dtype, device: str) -> "FeatureImages":
        """Load the modules of a folder."""
        from transformers import AutoConfig

        fields = AutoConfig.from_pretrained(path, local_files_only=True)
        if fields.vision_config is None:
            raise UnsupportedModelError(f"{path.name}: images need a vision_config, got none")
        processor = self.read_processor(path)
        check_equal(path, "text_config.hidden_size", fields.text_config.hidden_size, config.hidden_size)
        self.check(path, config, fields, processor)
        model = make_without_text(fields, dtype)
        self.read_weights(path, model, device)
        return FeatureImages(self, fields, model.eval(), processor)


@dataclass(frozen=True, eq=False)
class FeatureImages:
    """The loaded modules, see :class:`fastinfer.models.image_modules.ImageModules`.

    Attributes:
        family: properties of the images.
        fields: configuration of the whole model.
        model: the model without its decoder.
        processor: from images to pixels.
    """

    family: FeatureFamily
    fields: Any
    model: Any
    processor: Any

    @property
    def placeholder(self) -> str:
        return self.family.placeholder

    @property
    def token_id(self) -> int:
        token_id: int = self.fields.image_token_id
        return token_id

    def layout(self, image: Any) -> ImageLayout:
        return self.family.layout(self.fields, self.processor, image.height, image.width)

    def encode(self, image: Any, digest: bytes) -> EncodedImage:
        device = next(self.model.parameters()).device
        inputs = {name: values.to(device) for name, values in self.family.process(self.processor, image).items()}
        return self.family.encoded(self.fields, self.family.rows(self.model, inputs)[None].cpu(), digest)
