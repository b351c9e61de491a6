"""The blocks of one sequence in one group of layers."""

from dataclasses import dataclass, field

from fastinfer.engine.prompt_layout import Span


@dataclass(slots=True)
class BlockTable:
    """The blocks that hold a sequence's keys and values, in the order of its tokens.

    Attributes:
        blocks: block numbers. The list only grows at its end; for any other change it is replaced by a new list.
        num_dropped: number of leading blocks that the sequence does not hold any more, as no later token sees them.
            Their numbers are of no meaning, but valid: a kernel may load their elements, which it masks.
    """

    blocks: list[int] = field(default_factory=list)
    num_dropped: int = 0
    _seen: tuple[list[int], Span, list[int]] | None = None

    def seen_in(self, span: Span) -> list[int]:
        """Return the blocks that the tokens of a span see; the list grows at its end, or is replaced, as ``blocks``."""
        if self._seen is None or self._seen[0] is not self.blocks or self._seen[1] is not span:
            self._seen = self.blocks, span, [self.blocks[index] for index in span.others]
        seen = self._seen[2]
        seen += self.blocks[span.first_block + len(seen) - len(span.others) :]
        return seen

    @property
    def held(self) -> list[int]:
        """The blocks that the sequence holds, as a new list."""
        return self.blocks[self.num_dropped :]

    @property
    def num_held(self) -> int:
        """Number of blocks that the sequence holds."""
        return len(self.blocks) - self.num_dropped
