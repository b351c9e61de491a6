"""The slots that hold one sequence's states in the layers with linear attention."""

from dataclasses import dataclass, field
from typing import NamedTuple

from fastinfer.engine.prefix_hash import BlockContent


class Snapshot(NamedTuple):
    """States in the middle of a text, for later sequences that begin with the same tokens.

    Attributes:
        num_tokens: number of tokens after which they are, a multiple of the block size.
        slot: slot that holds them.
    """

    num_tokens: int
    slot: int


@dataclass(slots=True)
class StateTable:
    """The slots that a sequence holds; they are managed by ``StateManager``.

    Attributes:
        current: slot with the states after the computed tokens; ``None`` before the first one.
        next: slot for the states after the next chunk, which may be the current one; ``None`` if none is reserved.
        drafts: slots for the states after each draft of the next chunk.
        snapshots: snapshots that are not in the prefix cache yet.
        rolling: slot and content of the last snapshot that the next one replaces in the prefix cache.
        newest: content of the newest snapshot of the sequence's text, that of its prefix at first; ``None`` without
            one, and if others are known to have the same beginning.
        num_shared_tokens: number of tokens whose keys and values were in the prefix cache when the sequence was
            admitted. As others have them too, a snapshot is made there.
        num_loaded_blocks: number of blocks up to the last snapshot that the prefix cache or a store beyond it had when
            the sequence was admitted; blocks are loaded up to there.
        pinned: slots of snapshots that stay in the prefix cache, as those of a pinned prompt.
    """

    current: int | None = None
    next: int | None = None
    drafts: list[int] = field(default_factory=list)
    snapshots: list[Snapshot] = field(default_factory=list)
    rolling: tuple[int, BlockContent] | None = None
    newest: BlockContent | None = None
    num_shared_tokens: int = 0
    num_loaded_blocks: int = 0
    pinned: list[int] = field(default_factory=list)

    @property
    def held(self) -> list[int]:
        """The slots that the sequence holds, with repetitions if it holds a slot for several reasons."""
        own = {slot for slot in (self.current, self.next, *self.drafts) if slot is not None}
        return [*own, *(snapshot.slot for snapshot in self.snapshots), *self.pinned]
