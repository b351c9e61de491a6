"""Images in the messages of a conversation, and the tokens that stand for them in its prompt."""

import base64
import binascii
import io
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fastinfer.engine.prompt_images import PromptImages
from fastinfer.errors import PromptTooLongError, RequestError
from fastinfer.models.image_encoder import MISSING, ImageEncoder
from fastinfer.models.image_tokens import ImageLayout
from fastinfer.utils.checks import show
from fastinfer.utils.text import one_line

# Limits of a conversation, and of each of its images.
MAX_IMAGES = 64
MAX_IMAGE_BYTES = 2**25
MAX_IMAGE_PIXELS = 2**25
# Of all images: their pixels are in memory at once, with three bytes each.
MAX_PIXELS = 2**26
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
TYPES = ("image_url", "image")


def take_images(messages: object) -> tuple[Any, list[Any]]:
    """Read the images of messages.

    An image is a part ``{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}`` of a message's
    content, or ``{"type": "image", "image": ...}`` with a ``PIL.Image.Image``, a file's bytes, or such a URI. Nothing
    is fetched: other URLs are refused.

    Args:
        messages: messages, which need not be valid in other respects.

    Returns:
        The messages, with ``{"type": "image"}`` in place of each image, and the images in mode RGB, in this order.

    Raises:
        RequestError: an image is malformed or too large, there are too many, or pillow is not installed.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        return messages, []
    opened: list[_OpenedImage] = []
    taken = []
    for index, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, list) and any(map(is_image, content)):
            parts = []
            for number, part in enumerate(content):
                if is_image(part):
                    if len(opened) == MAX_IMAGES:
                        raise RequestError(f"messages: expected at most {MAX_IMAGES} images, got more")
                    opened.append(_open_part(part, f"messages[{index}]['content'][{number}]"))
                    part = {"type": "image"}
                parts.append(part)
            message = {**message, "content": parts}
        taken.append(message)
    num_pixels = sum(each.image.width * each.image.height for each in opened)
    if num_pixels > MAX_PIXELS:  # before any is decoded: a file may be a thousandth of its pixels
        raise RequestError(
            f"messages: expected images of at most {MAX_PIXELS} pixels in all, got {len(opened)} of {num_pixels}"
        )
    return taken, [_read(each) for each in opened]


def is_image(part: object) -> bool:
    """Return whether a part of a content is an image."""
    return isinstance(part, Mapping) and part.get("type") in TYPES


def spell_images(messages: list[dict[str, Any]], marker: str) -> list[dict[str, Any]]:
    """Return messages whose contents are texts, for a chat template that writes no images.

    Args:
        messages: messages whose images are ``{"type": "image"}``.
        marker: what stands for an image.
    """
    return [
        message
        if isinstance(message["content"], str)
        else {**message, "content": "".join(marker if is_image(part) else part["text"] for part in message["content"])}
        for message in messages
    ]


def lay_out_images(
    encoder: ImageEncoder, pieces: list[tuple[str, bool]], images: list[Any]
) -> tuple[list[tuple[str, bool]], list[ImageLayout]]:
    """Write the layout of each image into a rendered conversation.

    Args:
        encoder: the model's encoder.
        pieces: pieces of the conversation, and whether the control tokens in each are meant as such.
        images: the images in mode RGB, in their order in the conversation.

    Returns:
        The pieces with one token for each run of an image's tokens, and the layouts.

    Raises:
        RequestError: the chat template has another number of images, or one has a shape that is not supported.
        UnsupportedModelError, CheckpointFormatError: the encoder cannot be loaded.
    """
    placeholder = encoder.placeholder()
    if (count := sum(piece.count(placeholder) for piece, special in pieces if special)) != len(images):
        raise RequestError(
            f"messages: the model's chat template must write {placeholder} for each of {len(images)} images, "
            f"got {count}"
        )
    layouts = [encoder.layout(image) for image in images]
    left = iter(layouts)
    written = [
        (re.sub(re.escape(placeholder), lambda _: next(left).text, piece) if special else piece, special)
        for piece, special in pieces
    ]
    return written, layouts


def place_images(
    encoder: ImageEncoder,
    token_ids: list[int],
    images: list[Any],
    layouts: list[ImageLayout],
    max_model_len: int,
    cache_salt: str,
) -> tuple[list[int], PromptImages]:
    """Replace the token that stands for each run of an image's tokens by as many as it has, and encode the images.

    Args:
        encoder: the model's encoder.
        token_ids: prompt with one token for each run.
        images: the images in mode RGB, in the order of these tokens.
        layouts: their layouts.
        max_model_len: longest sequence in tokens, which the prompt must not reach.
        cache_salt: salt of the cached images.

    Raises:
        RequestError: the tokenizer makes other tokens of the layouts, or the prompt is too long.
        UnsupportedModelError, CheckpointFormatError: the encoder cannot be loaded.
    """
    image_id, runs = encoder.token_id(), [count for layout in layouts for count in layout.runs]
    if (count := token_ids.count(image_id)) != len(runs):
        raise RequestError(
            f"messages: the model's tokenizer must make the token {image_id} of each of {len(runs)} spellings in "
            f"{len(images)} images, got {count}"
        )
    if (length := len(token_ids) + sum(runs) - len(runs)) >= max_model_len:
        raise PromptTooLongError(
            f"prompt must be shorter than max_model_len={max_model_len} tokens, got {length}, "
            f"{sum(runs)} of them for images",
            max_model_len,
        )
    parts = []
    for image, layout in zip(images, layouts, strict=True):
        parts += encoder.encode(image, cache_salt).divide(layout.runs)
    left, placed, expanded = iter(parts), [], list[int]()
    for token_id in token_ids:
        if token_id == image_id:
            part = next(left)
            placed.append((len(expanded), part))
            expanded += [image_id] * part.num_tokens
        else:
            expanded.append(token_id)
    return expanded, PromptImages(placed)


class _OpenedImage(NamedTuple):
    """An image whose size is known, and whose pixels need not be decoded.

    Attributes:
        image: the image.
        place: where it is, for messages.
        is_file: whether it comes from a file, which may say how it is turned.
    """

    image: Any
    place: str
    is_file: bool


def _open_part(part: Mapping[str, Any], place: str) -> _OpenedImage:
    """Open the image of a part."""
    kind = part["type"]
    value = part.get(kind)
    if isinstance(value, Mapping):
        value = value.get("url")
    if isinstance(value, str):
        value = _decode(value, place)
    try:
        from PIL import Image
    except ImportError:
        raise RequestError(MISSING) from None
    if isinstance(value, Image.Image):
        return _OpenedImage(_checked(value, place), place, is_file=False)
    if not isinstance(value, bytes):
        raise RequestError(f"{place}: expected an {kind} with a data: URI, got {one_line(show(value))}")
    if len(value) > MAX_IMAGE_BYTES:
        raise RequestError(f"{place}: expected an image of at most {MAX_IMAGE_BYTES} bytes, got {len(value)}")
    try:
        image = Image.open(io.BytesIO(value), formats=FORMATS)
    except Exception as error:  # pillow's readers raise errors of many kinds for damaged files
        raise _damaged(place, error) from None
    return _OpenedImage(_checked(image, place), place, is_file=True)


def _read(opened: _OpenedImage) -> Any:
    """Return an image in mode RGB."""
    from PIL import ImageOps

    try:
        image = ImageOps.exif_transpose(opened.image) if opened.is_file else opened.image
        return image.convert("RGB")
    except Exception as error:
        raise _damaged(opened.place, error) from None


def _damaged(place: str, error: Exception) -> RequestError:
    return RequestError(
        f"{place}: expected an image of the kinds {', '.join(FORMATS)}, got a file that is none: "
        f"{one_line(error).partition(' <_io')[0]}"
    )


def _checked(image: Any, place: str) -> Any:
    """Return an image that has neither too many pixels nor none."""
    if not 0 < image.width * image.height <= MAX_IMAGE_PIXELS:
        raise RequestError(
            f"{place}: expected an image of 1 to {MAX_IMAGE_PIXELS} pixels, got {image.width} x {image.height}"
        )
    return image


def _decode(url: str, place: str) -> bytes:
    """Return the bytes of a data: URI."""
    header, comma, data = url.partition(",")
    if not (comma and header.startswith("data:image/") and header.endswith(";base64")):
        raise RequestError(f"{place}: expected a URI data:image/...;base64,..., got {one_line(show(url[:60]))}")
    if len(data) > 4 * MAX_IMAGE_BYTES // 3 + 4:
        raise RequestError(f"{place}: expected an image of at most {MAX_IMAGE_BYTES} bytes, got more")
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"{place}: expected base64, got text that is none: {one_line(error)}") from None
