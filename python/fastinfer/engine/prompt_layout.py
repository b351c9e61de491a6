"""The layout of a prompt of modules: at which positions its tokens are, in which slots, and which blocks they see.

A prompt of modules consists of pieces, each of which begins at a given position. A piece that is a module is computed
by itself at its positions, so that its whole blocks are the same in every prompt that has it there. The method is that
of Prompt Cache (Gim et al., 2024, https://arxiv.org/abs/2311.04934). Tokens that were computed by themselves have not
seen what precedes their module, and the first of them take the place of the text's beginning. So the first block of a
module is computed once more as a part of the prompt, as in EPIC (Hu et al., 2025, https://arxiv.org/abs/2410.15332).

The slots of a prompt come in this order:

1. the whole blocks of each module, computed from the module alone;
2. all other tokens in the order of their positions: the first blocks of the modules again, what is left of the modules
   after their whole blocks, the pieces in between, the text at the end, and then the generated tokens.

With blocks of 4 tokens, for a module ``A`` of 9 tokens, a parameter ``p`` of 1 and a module ``B`` of 10::

    slots         0 ..... 7   8 ...... 15   16   17   18 ...... 21   22 23   24
    tokens        A0 ... A7   B0 ..... B7   A8   p    B0 ...... B3   B8 B9   text
    sees before   -           -             0-7, and from 16 on      0-7, 12-15, and from 16 on

Slots whose tokens see the same blocks form a :class:`Span`. A step computes slots of one span alone, whose block table
has the blocks that the span sees. ``A`` is not recomputed here, because nothing precedes it.
"""

import bisect
from dataclasses import dataclass

import numpy as np

from fastinfer.engine.prefix_hash import next_key


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a prompt.

    Attributes:
        token_ids: its tokens.
        position: position of the first one.
        is_module: whether it is computed by itself.
    """

    token_ids: list[int]
    position: int
    is_module: bool = False


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive slots whose tokens see the same blocks.

    Attributes:
        start: first slot.
        others: indices in the block table of the blocks that are seen first.
        first_block: index of the block from which on all are seen, up to the token's own slot.
    """

    start: int
    others: tuple[int, ...]
    first_block: int


class PromptLayout:
    """The layout of one prompt; see the module's text.

    Args:
        pieces: the parts of the prompt in the order of their positions, none of them empty.
        block_size: tokens per block of the cache.
        recomputed_blocks: number of blocks of each module that are computed again as a part of the prompt.

    Attributes:
        token_ids: tokens of the prompt by slot; generated tokens follow.
    """

    def __init__(self, pieces: list[Piece], block_size: int, recomputed_blocks: int) -> None:
        self.token_ids: list[int] = []
        self._block_size = block_size
        self._modules: dict[int, tuple[int, int]] = {}  # by first block: number of blocks, position
        self._places: list[tuple[int, int]] = []  # slots from which on positions are consecutive, and their positions
        reused: list[int] = []
        for index, piece in enumerate(pieces):
            # The last token is a part of the prompt in any case, as the next one is drawn after it.
            whole = (len(piece.token_ids) - (index == len(pieces) - 1)) // block_size if piece.is_module else 0
            reused.append(whole if whole > (recomputed_blocks if index else 0) else 0)
        spans: list[Span] = []
        for piece, count in zip(pieces, reused, strict=True):
            if count:
                first = len(self.token_ids) // block_size
                self._modules[first] = count, piece.position
                spans.append(Span(len(self.token_ids), (), first))
                self._place(piece.token_ids[: count * block_size], piece.position)
        self._num_module_blocks = len(self.token_ids) // block_size
        self._reading: list[range] = []  # slots of the tokens as they are read, to which the rest of the slots belongs
        blocks, others = iter(self._modules), tuple[int, ...]()
        for index, (piece, count) in enumerate(zip(pieces, reused, strict=True)):
            first_own = 0
            if count:
                first, first_own = next(blocks), min(recomputed_blocks, count) if index else 0
                self._read(spans, others, piece.token_ids[: first_own * block_size], piece.position)
                seen = range(first + first_own, first + count)
                self._reading.append(range(seen.start * block_size, seen.stop * block_size))
                others += tuple(seen)
            rest = piece.token_ids[count * block_size :]
            self._read(spans, others, rest, piece.position + count * block_size)
        self._spans = spans
        self._span_starts = [span.start for span in spans]
        self._place_slots = np.array([slot for slot, _ in self._places])
        self._shifts = np.array([position - slot for slot, position in self._places])

    @property
    def shift(self) -> int:
        """Difference between position and slot of the last tokens, generated ones included."""
        return int(self._shifts[-1])

    def span(self, slot: int) -> Span:
        """Return the span of a slot."""
        return self._spans[bisect.bisect_right(self._span_starts, slot) - 1]

    def chunk_end(self, start: int, end: int) -> int:
        """Return the last slot up to ``end`` at which a chunk that begins at ``start`` may end."""
        following = bisect.bisect_right(self._span_starts, start)
        return min(end, self._span_starts[following]) if following < len(self._spans) else end

    def num_seen(self, slot: int) -> int:
        """Return the number of tokens before the one in a slot that this one sees."""
        span = self.span(slot)
        return slot + (len(span.others) - span.first_block) * self._block_size

    def positions(self, start: int, end: int) -> np.ndarray:
        """Return the positions of the tokens in a range of slots, [end - start] int64."""
        slots = np.arange(start, end)
        slots += self._shifts[np.searchsorted(self._place_slots, slots, side="right") - 1]
        return slots

    def num_module_blocks(self, slot: int) -> int:
        """Return the number of blocks of the module that begins at a slot; 0 if none does."""
        block, offset = divmod(slot, self._block_size)
        return 0 if offset else self._modules.get(block, (0, 0))[0]

    def as_read(self, token_ids: list[int]) -> list[int]:
        """Return the tokens of a prompt in the order in which they are read, given all of them by slot."""
        return [token_ids[slot] for slot in self._slots_as_read(len(token_ids))]

    def num_as_read(self, num_slots: int) -> int:
        """Return how many tokens of the prompt the first slots hold, without those that are computed again."""
        return sum(slot < num_slots for slot in self._slots_as_read(num_slots))

    def key_before(self, first_key: bytes, keys: list[bytes]) -> bytes:
        """Return the key that the key of the next block follows, see :mod:`fastinfer.engine.prefix_hash`.

        A module has a chain of its own. The other tokens' begins with the keys of all modules and the layout. At
        position 0 a chain is that of any other prompt.

        Args:
            first_key: key before any token.
            keys: keys of the blocks so far.
        """
        index = len(keys)
        if index in self._modules:
            _, position = self._modules[index]
            return next_key(first_key, f"module at {position}".encode()) if position else first_key
        is_ordinary = self._places == [(0, 0)] and len(self._modules) <= 1
        if index != self._num_module_blocks or (is_ordinary and keys):
            return keys[-1]
        if is_ordinary:
            return first_key
        for first, (count, _) in self._modules.items():
            first_key = next_key(first_key, keys[first + count - 1])
        return next_key(first_key, repr((self._places, self._spans)).encode())

    def _place(self, token_ids: list[int], position: int) -> None:
        """Append tokens at the next slots."""
        slot = len(self.token_ids)
        if not self._places or position - slot != self._places[-1][1] - self._places[-1][0]:
            self._places.append((slot, position))
        self.token_ids += token_ids

    def _read(self, spans: list[Span], others: tuple[int, ...], token_ids: list[int], position: int) -> None:
        """Append tokens that see what was read before, among it these blocks of modules."""
        if not token_ids:
            return
        slot = len(self.token_ids)
        if slot == self._num_module_blocks * self._block_size or spans[-1].others != others:
            spans.append(Span(slot, others, self._num_module_blocks))
        self._place(token_ids, position)
        self._reading.append(range(slot, len(self.token_ids)))

    def _slots_as_read(self, num_slots: int) -> list[int]:
        slots = [slot for part in self._reading for slot in part]
        return slots + list(range(len(self.token_ids), num_slots))
