"""Encoders of images, whose modules and processors are those of transformers."""

import hashlib
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

from fastinfer.errors import CheckpointFormatError, FastinferError, RequestError
from fastinfer.models.checkpoint import Checkpoint
from fastinfer.models.config import ModelConfig, Precision
from fastinfer.models.gemma4_images import Gemma4Family, Gemma4UnifiedFamily
from fastinfer.models.gemma_images import GemmaFamily
from fastinfer.models.gguf_checkpoint import GGUFCheckpoint
from fastinfer.models.idefics_images import IdeficsFamily
from fastinfer.models.image_modules import ImageFamily, ImageModules, architecture_of
from fastinfer.models.image_tokens import EncodedImage, ImageLayout
from fastinfer.models.intern_images import InternFamily
from fastinfer.models.mistral_images import MistralFamily
from fastinfer.models.mmproj import Mmproj, find_mmproj
from fastinfer.models.qwen_images import GLM4V, QWEN2_5_VL, QWEN2_VL, QWEN3_5, QWEN3_VL
from fastinfer.utils.forks import renew_in_children
from fastinfer.utils.text import one_line

# Encoded images that are kept, because the next request of a conversation has the same ones.
CACHE_BYTES = 2**29
MISSING = "images need the packages transformers and pillow: install fastinfer[images]"


FAMILIES: dict[str, ImageFamily] = {
    "Gemma3ForConditionalGeneration": GemmaFamily(),
    "Gemma4ForConditionalGeneration": Gemma4Family(),
    "Gemma4UnifiedForConditionalGeneration": Gemma4UnifiedFamily(),
    "Glm46VForConditionalGeneration": GLM4V,
    "Glm4vForConditionalGeneration": GLM4V,
    "Glm4vMoeForConditionalGeneration": GLM4V,
    "Idefics3ForConditionalGeneration": IdeficsFamily(),
    "InternVLForConditionalGeneration": InternFamily(),
    "Mistral3ForConditionalGeneration": MistralFamily(),
    "Qwen2VLForConditionalGeneration": QWEN2_VL,
    "Qwen2_5_VLForConditionalGeneration": QWEN2_5_VL,
    "Qwen3VLForConditionalGeneration": QWEN3_VL,
    "Qwen3VLMoeForConditionalGeneration": QWEN3_VL,
    "Qwen3_5ForConditionalGeneration": QWEN3_5,
    "Qwen3_5MoeForConditionalGeneration": QWEN3_5,
    "SmolVLMForConditionalGeneration": IdeficsFamily(),
}


def image_encoder_of(
    checkpoint: Checkpoint, precision: Precision, device: str, mmproj: Path | None = None
) -> "ImageEncoder | None":
    """Return the encoder of a checkpoint's images, or ``None`` if its model has text alone or images of other kinds.

    Args:
        checkpoint: checkpoint of the model.
        precision: precision of the model.
        device: device that computes.
        mmproj: GGUF file with the encoder of a GGUF model; ``None`` to look for one beside it.

    Raises:
        RequestError: there is such a file for a folder, which has its own encoder.
        ModelNotFoundError, GGUFFormatError, UnsupportedModelError: the file does not fit the model, see
            :class:`fastinfer.models.mmproj.Mmproj`.
    """
    config, dtype = checkpoint.config, precision.dtype
    if isinstance(checkpoint, GGUFCheckpoint):
        found = find_mmproj(checkpoint) if mmproj is None else Mmproj(mmproj, checkpoint)
        return None if found is None else ImageEncoder(found.path, config, found, dtype, device, found.marker)
    if mmproj is not None:
        raise RequestError(f"mmproj needs a model that is a GGUF file, got {checkpoint.path}")
    family = FAMILIES.get(architecture_of(checkpoint.path))
    return None if family is None else ImageEncoder(checkpoint.path, config, family, dtype, device)


class ImageEncoder:
    """Encodes images for a decoder; may be called from several threads.

    Nothing is loaded before the first image. Images are encoded one by one, so that the result does not depend on the
    others of a prompt.

    Args:
        path: folder of the checkpoint, or file of the encoder.
        config: configuration of the decoder.
        family: how the architecture has images.
        dtype: dtype in which the encoder computes.
        device: device that computes.
        marker: what stands for an image in a conversation; ``None`` if the model's chat template writes it.

    Attributes:
        path, marker: see above.
    """

    def __init__(
        self,
        path: Path,
        config: ModelConfig,
        family: ImageFamily,
        dtype: torch.dtype,
        device: str,
        marker: str | None = None,
    ) -> None:
        self.path = path
        self.marker = marker
        self._config = config
        self._family = family
        self._dtype = dtype
        self._device = device
        self._loaded: ImageModules | None = None
        self._cache: OrderedDict[tuple[str, bytes], EncodedImage] = OrderedDict()
        self._lock = threading.Lock()
        renew_in_children(self)

    @property
    def files(self) -> list[Path]:
        """Paths of files that the model's checkpoint does not have."""
        return [self.path] if self.path.is_file() else []

    def renew_after_fork(self) -> None:
        """Replace the lock, which another thread of the parent may have held."""
        self._lock = threading.Lock()

    def release(self) -> None:
        """Free the modules and the kept images until the next image."""
        with self._lock:
            self._loaded = None
            self._cache.clear()

    def token_id(self) -> int:
        """Return the token whose rows an image has.

        Raises:
            RequestError, UnsupportedModelError, CheckpointFormatError: the encoder cannot be loaded.
        """
        return self._load().token_id

    def placeholder(self) -> str:
        """Return what the chat template writes for an image; raises the same."""
        return self._load().placeholder

    def layout(self, image: Any) -> ImageLayout:
        """Return what stands for an image in a prompt, without encoding it.

        Args:
            image: a ``PIL.Image.Image`` in mode RGB.

        Raises:
            RequestError: the image has a shape that the model does not support.
            UnsupportedModelError, CheckpointFormatError: the encoder cannot be loaded.
        """
        loaded = self._load()
        try:
            return loaded.layout(image)
        except ValueError as error:
            raise RequestError(
                f"messages: an image of {image.width} x {image.height} pixels: {one_line(error)}"
            ) from None

    def encode(self, image: Any, cache_salt: str) -> EncodedImage:
        """Encode an image, or return it as it was encoded before.

        Args:
            image: a ``PIL.Image.Image`` in mode RGB.
            cache_salt: an image is found again only under the salt under which it was encoded, so that the time of an
                answer does not tell which images others have sent.

        Raises:
            RequestError, UnsupportedModelError, CheckpointFormatError: as for :meth:`layout`.
        """
        loaded = self._load()
        digest = hashlib.sha256(repr(image.size).encode() + image.tobytes()).digest()
        with self._lock:
            if (encoded := self._cache.pop((cache_salt, digest), None)) is None:
                encoded = self._encode(loaded, image, digest)
            self._cache[cache_salt, digest] = encoded  # the most recently used one comes last
            while sum(kept.features.nbytes for kept in self._cache.values()) > CACHE_BYTES:
                self._cache.popitem(last=False)
        return encoded

    @torch.inference_mode()
    def _encode(self, loaded: ImageModules, image: Any, digest: bytes) -> EncodedImage:
        return loaded.encode(image, digest)

    def _load(self) -> ImageModules:
        """Load the modules, the first time."""
        with self._lock:
            if self._loaded is None:
                try:
                    import PIL  # noqa: F401

                    self._loaded = self._family.read(self.path, self._config, self._dtype, self._device)
                except FastinferError:
                    raise
                except ImportError:
                    raise RequestError(MISSING) from None
                except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                    # What transformers raises for files that it does not understand.
                    reason = one_line(str(error).replace(str(self.path), self.path.name))
                    raise CheckpointFormatError(f"{self.path.name}: images: {reason}") from None
            return self._loaded
