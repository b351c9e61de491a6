"""The tokens of images in a step."""

from collections.abc import Sequence as List

import numpy as np
import torch
from torch import Tensor

from fastinfer.engine.chunk import Chunk
from fastinfer.engine.prompt_images import PromptImages
from fastinfer.models.image_tokens import ImageTokens


def place_images(chunks: List[Chunk], positions: np.ndarray, device: torch.device) -> ImageTokens | None:
    """Replace the positions of a batch by rotary positions, and collect the rows of its images.

    Args:
        chunks: chunks of the batch, some of whose prompts have images.
        positions: [tokens] int64; positions of the tokens, changed in place.
        device: device of the batch.

    Returns:
        The tokens of images on the device; ``None`` if there are none in this batch.
    """
    rows: list[Tensor] = []
    features: list[Tensor] = []
    spans: list[slice] = []
    offsets: list[tuple[Tensor, int, Tensor]] = []  # rows, position of the image's beginning, offsets from there
    end = 0
    for chunk in chunks:
        first_row, position = end, chunk.start
        end += chunk.num_tokens + len(chunk.drafts)
        images, stop = chunk.sequence.images, chunk.start + end - first_row
        if images is None:
            continue
        for start, image in images.within(position, stop):
            _shift(
                positions, first_row + position - chunk.start, first_row + max(start, position) - chunk.start, images
            )
            begin, position = max(start, position), min(start + image.num_tokens, stop)
            own = torch.arange(begin, position) - chunk.start + first_row
            part = slice(begin - start, position - start)
            rows.append(own)
            if image.is_bidirectional:
                assert len(own) == image.num_tokens
                spans.append(slice(int(own[0]), int(own[-1]) + 1))
            features.append(image.features[:, part])
            base = images.rotary_position(start)
            positions[own.numpy()] = base + np.arange(part.start, part.stop)
            if image.rotary_offsets is not None:
                offsets.append((own, base, image.rotary_offsets[part]))
        _shift(positions, first_row + position - chunk.start, end, images)
    if not rows:
        return None
    rotary = None
    if offsets:
        rotary = torch.from_numpy(positions[:, None]).repeat(1, offsets[0][2].shape[1])
        for own, base, its_offsets in offsets:
            rotary[own] = base + its_offsets
        rotary = rotary.to(device)
    return ImageTokens(
        rows=torch.cat(rows).to(device),
        features=torch.cat(features, dim=1).to(device),
        rotary_positions=rotary,
        spans=tuple(spans),
        in_windows_alone=image.in_windows_alone,
        layer_token=image.layer_token,
    )


def _shift(positions: np.ndarray, begin: int, end: int, images: PromptImages) -> None:
    """Replace consecutive positions of text by their rotary positions."""
    if begin < end:
        first = int(positions[begin])
        positions[begin:end] += images.rotary_position(first) - first
