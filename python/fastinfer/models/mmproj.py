"""Image encoders in a GGUF file beside that of the model, which llama.cpp calls multimodal projectors (mmproj)."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from fastinfer.errors import FastinferError, GGUFFormatError, UnsupportedModelError
from fastinfer.formats.gguf import GGUFFile
from fastinfer.formats.gguf_shards import open_gguf
from fastinfer.models.config import ModelConfig
from fastinfer.models.gguf_checkpoint import GGUFCheckpoint
from fastinfer.models.image_modules import ImageModules
from fastinfer.models.mmproj_fields import MmprojFields, read_fields
from fastinfer.models.mmproj_gemma3 import Gemma3Encoder, gemma3_width
from fastinfer.models.mmproj_qwen import KINDS, QwenEncoder, qwen_width
from fastinfer.models.mmproj_tensors import MmprojTensors
from fastinfer.utils.gguf_names import is_mmproj

LOG = logging.getLogger("fastinfer")


class MmprojEncoder(Protocol):
    """An encoder whose metadata have been read, and whose tensors have not."""

    @property
    def tensors(self) -> MmprojTensors:
        """The file's tensors."""
        ...

    @property
    def marker(self) -> str:
        """Text that stands for an image in a conversation whose chat template has text alone."""
        ...

    def load(self, config: ModelConfig, dtype: torch.dtype, device: str) -> ImageModules:
        """Load the modules for a decoder."""
        ...


@dataclass(frozen=True)
class Projector:
    """A kind of encoder, by ``clip.projector_type``.

    Attributes:
        architectures: architectures of the models that it belongs to.
        width: function that returns the name of the tensor whose outputs the decoder reads, and their number.
        describe: function that makes the encoder of a file, its fields, the model's file and its configuration.
    """

    architectures: tuple[str, ...]
    width: Callable[[MmprojTensors], tuple[str, int]]
    describe: Callable[[GGUFFile, MmprojFields, GGUFFile, ModelConfig], MmprojEncoder]


PROJECTORS = {
    "gemma3": Projector(("gemma3",), gemma3_width, Gemma3Encoder.of),
    "qwen2.5vl_merger": Projector(("qwen2vl",), qwen_width, QwenEncoder.of),
    "qwen3vl_merger": Projector(tuple(name for name in KINDS if name != "qwen2vl"), qwen_width, QwenEncoder.of),
}
ARCHITECTURES = tuple(name for projector in PROJECTORS.values() for name in projector.architectures)


class Mmproj:
    """The image encoder of a GGUF model, in a file of its own; see :class:`fastinfer.models.image_modules.ImageFamily`.

    Args:
        path: path of the file.
        model: checkpoint of the model.

    Attributes:
        path: path of the file.
        marker: what stands for an image in a conversation whose chat template has text alone.

    Raises:
        ModelNotFoundError: the file cannot be opened.
        GGUFFormatError: the file is malformed, has no image encoder, or one for another model.
        UnsupportedModelError: the encoder's kind is not implemented.
    """

    def __init__(self, path: Path, model: GGUFCheckpoint) -> None:
        file, config = open_gguf(path), model.config
        self.path = path
        architecture = file.get("general.architecture", str)
        if architecture != "clip":
            raise GGUFFormatError(
                f"{path}: expected an image encoder (general.architecture 'clip'), got {architecture!r:.80}"
            )
        if not file.get("clip.has_vision_encoder", bool, False):
            raise GGUFFormatError(f"{path}: clip.has_vision_encoder must be true, got false")
        key = "clip.projector_type"
        kind = file.get(key if key in file.metadata else "clip.vision.projector_type", str)
        if kind not in PROJECTORS:
            raise UnsupportedModelError(f"{path}: {key} must be one of {', '.join(PROJECTORS)}, got {kind!r:.80}")
        projector = PROJECTORS[kind]
        if config.architecture not in projector.architectures:
            raise GGUFFormatError(
                f"{path}: the encoder {kind!r} needs a model of {' or '.join(projector.architectures)}, "
                f"got {model.path.name} of {config.architecture!r}"
            )
        tensors, fields = MmprojTensors(file), read_fields(file)
        name, width = projector.width(tensors)
        if width != config.hidden_size:
            raise GGUFFormatError(
                f"{path}: tensor {name!r} must have {config.hidden_size} outputs, as wide as the embedding of "
                f"{model.path.name}, got {width}"
            )
        tensors.check_shape(f"v.blk.{fields.num_layers - 1}.ln1.weight", (fields.width,))
        tensors.check_shape("v.patch_embd.weight", (fields.width, 3, fields.patch_size, fields.patch_size))
        self._encoder = projector.describe(file, fields, model.file, config)
        self.marker = self._encoder.marker

    def read(self, path: Path, config: ModelConfig, dtype: torch.dtype, device: str) -> ImageModules:
        """Load the modules; the path is the file's own."""
        loaded = self._encoder.load(config, dtype, device)
        self._encoder.tensors.check_all_read()
        return loaded


def find_mmproj(model: GGUFCheckpoint) -> Mmproj | None:
    """Return the encoder in the only file beside a model whose name has "mmproj", if it fits the model.

    Of several files none is chosen: they may belong to different models of the same sizes.
    """
    if model.config.architecture not in ARCHITECTURES:
        return None
    files = [path for path in model.path.parent.glob("*.gguf") if is_mmproj(path.name)]
    if len(files) != 1:
        if files:
            LOG.warning("no images: expected one mmproj file beside %s, found %d", model.path.name, len(files))
        return None
    try:
        return Mmproj(files[0], model)
    except FastinferError as error:
        LOG.warning("no images: %s", error)
        return None
