"""Base of the encoders of images: modules of transformers, with weights from a folder."""

from copy import deepcopy
from pathlib import Path
from typing import Any, Protocol

import torch

from fastinfer.errors import CheckpointFormatError, UnsupportedModelError
from fastinfer.formats.json_fields import JsonFields
from fastinfer.formats.linear_tensors import DENSE_DTYPES
from fastinfer.formats.safetensors_folder import SafetensorsFolder
from fastinfer.models.config import ModelConfig
from fastinfer.models.image_tokens import EncodedImage, ImageLayout


class ImageModules(Protocol):
    """The loaded modules of an encoder, for one image at a time, a ``PIL.Image.Image`` in mode RGB."""

    @property
    def token_id(self) -> int:
        """The token whose rows an image has."""
        ...

    @property
    def placeholder(self) -> str:
        """Text that the chat template writes for an image."""
        ...

    def layout(self, image: Any) -> ImageLayout:
        """Return what stands for an image in a prompt, without encoding it.

        Raises:
            ValueError: the image has a shape that the model does not support.
        """
        ...

    def encode(self, image: Any, digest: bytes) -> EncodedImage:
        """Encode an image whose pixels have this digest."""
        ...


class ImageFamily(Protocol):
    """How models of an architecture have images."""

    def read(self, path: Path, config: ModelConfig, dtype: torch.dtype, device: str) -> ImageModules:
        """Load the modules of a checkpoint.

        Args:
            path: its path.
            config: configuration of the decoder.
            dtype: dtype in which the encoder computes.
            device: device that computes.
        """
        ...


def architecture_of(path: Path) -> str:
    """Return the architecture of a folder's whole model, of which the decoder may be a part; "" for other files."""
    file = path / "config.json"
    if not file.is_file():
        return ""
    names = JsonFields.read(file, CheckpointFormatError).get("architectures", list, [])
    return str(names[0]) if names else ""


def read_processor(path: Path) -> Any:
    """Return the processor that scales images and normalises their pixels."""
    from transformers import AutoImageProcessor

    return AutoImageProcessor.from_pretrained(path, local_files_only=True, backend="pil")


def make_module(fields: Any, dtype: torch.dtype) -> Any:
    """Return a module for a part of a configuration, whose weights are to be read."""
    from transformers import AutoModel
    from transformers.initialization import no_init_weights

    with no_init_weights():
        return AutoModel.from_config(fields, dtype=dtype)


def make_without_text(fields: Any, dtype: torch.dtype) -> Any:
    """Return a model for a whole configuration, without its parts for text and sound, whose weights are to be read."""
    fields = deepcopy(fields)
    text = fields.text_config
    text.num_hidden_layers, text.vocab_size, text.pad_token_id = 0, 1, None
    fields.audio_config = None
    model = make_module(fields, dtype)
    for name in ("language_model", "text_model"):
        if hasattr(model, name):
            setattr(model, name, None)
    return model


def read_weights(path: Path, module: Any, prefixes: tuple[str, ...], device: str) -> Any:
    """Copy the weights of a module from a folder, and return it on the device.

    Args:
        path: the folder.
        module: the module.
        prefixes: prefixes of the names of its tensors in files of several ages; the first that occurs is used.
        device: device that computes.
    """
    tensors = SafetensorsFolder(path)
    prefix = next((p for p in prefixes if any(name.startswith(p) for name in tensors.names)), prefixes[0])
    for name, parameter in module.state_dict().items():
        values = tensors.get(prefix + name)
        if values is None:
            raise CheckpointFormatError(f"{path.name}: tensor {prefix + name!r} is missing")
        if values.dtype not in DENSE_DTYPES:
            raise UnsupportedModelError(
                f"{path.name}: tensor {prefix + name!r} must be of a float dtype, got {values.dtype}"
            )
        if values.shape != parameter.shape:
            raise CheckpointFormatError(
                f"{path.name}: tensor {prefix + name!r} must have the shape {list(parameter.shape)}, "
                f"got {list(values.shape)}"
            )
        parameter.copy_(values)
    tensors.release()
    return module.eval().requires_grad_(False).to(device)


def check_equal(path: Path, name: str, got: object, expected: object) -> None:
    """Refuse a value that contradicts another one.

    Raises:
        CheckpointFormatError: the two differ.
    """
    if got != expected:
        raise CheckpointFormatError(f"{path.name}: {name} must be {expected}, got {got!r:.80}")
