"""The images of a prompt: which of its tokens they are, and by which positions the tokens are rotated."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence as List
from itertools import accumulate

from fastinfer.models.image_tokens import EncodedImage


class PromptImages:
    """Images at their places in a prompt.

    Args:
        images: for each image, in order, the index of its first token, and the image.

    Attributes:
        borders: first tokens of bidirectional images, and of what follows them, in ascending order.
    """

    def __init__(self, images: List[tuple[int, EncodedImage]]) -> None:
        self._images = list(images)
        self._starts = [start for start, _ in images]
        together = [(start, start + image.num_tokens) for start, image in images if image.is_bidirectional]
        self.borders = [border for image in together for border in image]
        self._shifts = list(accumulate((image.num_tokens - image.num_positions for _, image in images), initial=0))

    def rotary_position(self, position: int) -> int:
        """Return the rotary position of a token that belongs to no image, or of the beginning of an image."""
        return position - self._shifts[bisect_left(self._starts, position)]

    def chunk_end(self, position: int) -> int:
        """Return the last position up to this one at which a chunk may end: not within a bidirectional image."""
        for start, image in self._images:
            if image.is_bidirectional and start < position < start + image.num_tokens:
                return start
        return position

    def num_together(self, position: int) -> int:
        """Return how many tokens from a position on one step must compute, 0 for any number."""
        for start, image in self._images:
            if image.is_bidirectional and start == position:
                return image.num_tokens
        return 0

    @property
    def max_together(self) -> int:
        """The largest number of tokens that one step must compute, 0 for any number."""
        return max((image.num_tokens for _, image in self._images if image.is_bidirectional), default=0)

    def within(self, start: int, stop: int) -> list[tuple[int, EncodedImage]]:
        """Return the images, with their places, that have tokens within a range of positions."""
        # An image may be hundreds of runs of tokens, and this is asked of every block.
        first = max(0, bisect_right(self._starts, start) - 1)
        found = self._images[first : bisect_left(self._starts, stop)]
        return found[1:] if found and found[0][0] + found[0][1].num_tokens <= start else found

    def mark(self, tokens: list[int], start: int) -> None:
        """Replace the ids of images' tokens by the images' contents, in a list that begins at position ``start``."""
        for first, image in self.within(start, start + len(tokens)):
            begin, end = max(first, start), min(first + image.num_tokens, start + len(tokens))
            tokens[begin - start : end - start] = image.contents[begin - first : end - first]
