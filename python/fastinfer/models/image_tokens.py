"""Images as a decoder sees them: rows that replace those of the embedding."""

import hashlib
from array import array
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

# Larger than any token id, so that no text has the contents of an image's tokens.
CONTENT_BIT = 2**62


@dataclass(frozen=True)
class ImageLayout:
    """Text and tokens that stand for an image in a prompt.

    Attributes:
        text: the text in place of what the chat template writes, with the image's token once for each run.
        runs: the number of the image's tokens in each run of them; between two runs there are tokens of text.
    """

    text: str
    runs: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class EncodedImage:
    """One image, encoded for a decoder.

    Attributes:
        features: [1 + n, tokens, hidden] in host memory; rows in place of the embedding's, and what is added to the
            output of each of the first n layers (DeepStack, https://arxiv.org/abs/2406.04334).
        digest: identity of the pixels that the encoder has seen, and of their size.
        num_positions: number of rotary positions that the image takes; the text after it goes on behind them.
        rotary_offsets: [tokens, rotary_dim / 2] int64; for each pair of elements of a head the position by which it is
            rotated, from that of the image's beginning on (M-RoPE, https://arxiv.org/abs/2409.12191); ``None`` for
            consecutive positions.
        is_bidirectional: whether its tokens see each other in both directions, so that one step must compute them all.
        in_windows_alone: whether they do so in layers with a window alone.
        layer_token: the token whose inputs of layers its tokens have, in models whose layers have inputs of their own;
            ``None`` for others.
    """

    features: Tensor
    digest: bytes
    num_positions: int
    rotary_offsets: Tensor | None = None
    is_bidirectional: bool = False
    in_windows_alone: bool = False
    layer_token: int | None = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens that stand for the image in a prompt."""
        return self.features.shape[1]

    def divide(self, runs: tuple[int, ...]) -> list["EncodedImage"]:
        """Return the runs of tokens, between which there is text, as images of their own.

        Only images with consecutive positions, whose tokens do not see those behind them, have several.
        """
        if len(runs) == 1:
            return [self]
        assert self.rotary_offsets is None
        assert not self.is_bidirectional
        digests = (hashlib.sha256(self.digest + number.to_bytes(4, "little")).digest() for number in range(len(runs)))
        parts = self.features.split(runs, dim=1)
        return [EncodedImage(part, digest, part.shape[1]) for part, digest in zip(parts, digests, strict=True)]

    @cached_property
    def contents(self) -> list[int]:
        """For each token a number by which the prefix cache knows it, in place of its id."""
        words = array("q", hashlib.shake_256(self.digest).digest(8 * self.num_tokens))
        return [word % CONTENT_BIT + CONTENT_BIT for word in words]


@dataclass(frozen=True, eq=False)
class ImageTokens:
    """The tokens of images in a batch.

    Attributes:
        rows: [n] int64; their indices in the batch.
        features: [1 + m, n, hidden]; see :class:`EncodedImage`.
        rotary_positions: [tokens, rotary_dim / 2] int64; for all tokens of the batch, the position by which each pair
            of elements is rotated; ``None`` if it is the same for all pairs.
        spans: rows of whole images whose tokens see each other in both directions.
        in_windows_alone, layer_token: see :class:`EncodedImage`; the same for all images of a model.
    """

    rows: Tensor
    features: Tensor
    rotary_positions: Tensor | None = None
    spans: tuple[slice, ...] = ()
    in_windows_alone: bool = False
    layer_token: int | None = None
    _tables: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def embed(self, x: Tensor, scale: float) -> None:
        """Replace rows of the embedding, which lack the factor ``scale``, in place."""
        x[self.rows] = (self.features[0] / scale).to(x.dtype)

    def add(self, x: Tensor, layer: int) -> None:
        """Add to the output of a layer, in place, what belongs there."""
        if layer + 1 < len(self.features):
            x.index_add_(0, self.rows, self.features[layer + 1].to(x.dtype))

    def layer_tokens(self, token_ids: Tensor) -> Tensor:
        """Return for each token of the batch the one whose inputs of layers it has, [tokens] int64."""
        return token_ids if self.layer_token is None else token_ids.index_fill(0, self.rows, self.layer_token)

    def spans_of(self, window: int) -> tuple[slice, ...]:
        """Return ``spans`` as they are in a layer with a window of this length, 0 for none."""
        return () if self.in_windows_alone and not window else self.spans

    def rotation(self, positions: Tensor, cos_sin_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Return positions and a rotary table that rotate as ``rotary_positions`` say, or the arguments without them.

        Args:
            positions: [tokens] int64; positions of the tokens.
            cos_sin_cache: [max_position, rotary_dim] fp32.
        """
        if self.rotary_positions is None:
            return positions, cos_sin_cache
        key = id(cos_sin_cache)  # the decoder keeps it, and the layers share it
        if key not in self._tables:
            table = cos_sin_cache.gather(0, self.rotary_positions.repeat(1, 2))
            self._tables[key] = torch.arange(len(table), device=table.device), table
        return self._tables[key]
