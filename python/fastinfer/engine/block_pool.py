"""The blocks of one group of layers: which are free, which are used, and which are cached under their content."""

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice

from fastinfer.engine.prefix_hash import BlockContent


class BlockPool:
    """Counts the holders of each block, and finds blocks by their content.

    Each block is in one of three states:

    - used: at least one sequence holds it;
    - cached: no sequence holds it, but a later one may find its content. When no block is free, the cached block that
      was released longest ago is reused;
    - free.

    Args:
        num_blocks: number of blocks.
        window: length in positions of the attention window of the group's layers; 0 for none.

    Attributes:
        num_blocks, window: see above.
        num_acquired: cached blocks that became used since the start.
        num_published: contents for which a block became known since the start.
        on_eviction: function that is called with a block and its content when it leaves the prefix cache for lack of
            room, before the block is reused; ``None`` for none.
    """

    def __init__(self, num_blocks: int, window: int = 0) -> None:
        self.num_blocks = num_blocks
        self.window = window
        self.num_acquired = 0
        self.num_published = 0
        self.on_eviction: Callable[[int, BlockContent], None] | None = None
        # A stack with block 0 on top, so that released blocks are reused before memory that was never touched.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: dict[int, None] = {}  # in the order of their release
        self._ref_counts = [0] * num_blocks
        self._contents: list[BlockContent | None] = [None] * num_blocks
        self._by_key: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Number of free blocks."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Number of cached blocks."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Number of blocks that can be taken."""
        return len(self._free) + len(self._cached)

    def num_dropped(self, num_computed_tokens: int, block_size: int) -> int:
        """Return the number of leading blocks of a sequence that no token after its computed ones can see."""
        return max(num_computed_tokens - self.window + 1, 0) // block_size if self.window else 0

    def num_holders(self, block: int) -> int:
        """Return the number of sequences that hold a block."""
        return self._ref_counts[block]

    def take(self) -> int:
        """Return a block for new content: a free one, or else the cached one that was released longest ago."""
        if not self._free:
            self.evict(next(iter(self._cached)))
        block = self._free.pop()
        self._ref_counts[block] = 1
        return block

    def add_holder(self, block: int) -> None:
        """Add a holder to a block; a cached block becomes used."""
        self._ref_counts[block] += 1
        if block in self._cached:
            del self._cached[block]
            self.num_acquired += 1

    def remove_holder(self, block: int) -> None:
        """Remove a holder from a block; without holders it becomes cached if its content is known, and free if not."""
        self._ref_counts[block] -= 1
        if self._ref_counts[block] == 0:
            if self._contents[block] is None:
                self._free.append(block)
            else:
                self._cached[block] = None

    def holders_of_key(self, key: bytes) -> int | None:
        """Return how many sequences hold the block that is known under this key; ``None`` if there is no such block."""
        block = self._by_key.get(key)
        return None if block is None else self._ref_counts[block]

    def keys_since(self, num_published: int) -> Iterator[bytes]:
        """Return the keys of the contents that were published after the first ``num_published`` ones, newest first.

        As many keys are returned as were published, so that older ones follow if some of them are forgotten.
        """
        return islice(reversed(self._by_key), self.num_published - num_published)

    def content(self, block: int) -> BlockContent | None:
        """Return the content under which a block is found; ``None`` if it is not."""
        return self._contents[block]

    def find(self, content: BlockContent) -> int | None:
        """Return the block with this content; ``None`` if there is none."""
        block = self._by_key.get(content.key)
        return block if block is not None and self._contents[block] == content else None

    def publish(self, block: int, content: BlockContent) -> None:
        """Let later sequences find a used block by its content.

        If two sequences computed the same tokens at the same time, only the first one's block is found.
        """
        if content.key not in self._by_key:
            self._by_key[content.key] = block
            self._contents[block] = content
            self.num_published += 1

    def evict(self, block: int) -> None:
        """Remove a block from the prefix cache as :meth:`forget` does, after ``on_eviction`` was called with it."""
        content = self._contents[block]
        assert content is not None
        if self.on_eviction is not None:
            self.on_eviction(block, content)
        self.forget(block)

    def forget(self, block: int) -> None:
        """Remove a block that is found by its content from the prefix cache."""
        content = self._contents[block]
        assert content is not None
        del self._by_key[content.key]
        self._contents[block] = None
        if block in self._cached:
            del self._cached[block]
            self._free.append(block)

    def forget_contents(self) -> None:
        """Empty the prefix cache; sequences keep the blocks that they hold."""
        for block in self._by_key.values():
            self._contents[block] = None
        self._by_key.clear()
        self._free.extend(self._cached)
        self._cached.clear()

    def rebuild(self, held: Counter[int]) -> None:
        """Rebuild the books from the number of holders of each block, after an error at an arbitrary point.

        Of the prefix cache those entries stay on which its two tables agree.
        """
        self._ref_counts = [held[block] for block in range(self.num_blocks)]
        self._by_key = {key: block for key, block in self._by_key.items() if self._holds_key(block, key)}
        known = set(self._by_key.values())
        self._contents = [content if block in known else None for block, content in enumerate(self._contents)]
        self._cached = {block: None for block in [*self._cached, *known] if block in known and not held[block]}
        self._free = [b for b in range(self.num_blocks - 1, -1, -1) if b not in known and not held[b]]

    def _holds_key(self, block: int, key: bytes) -> bool:
        content = self._contents[block]
        return content is not None and content.key == key
