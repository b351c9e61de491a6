"""The paged KV cache's blocks: who holds which, and which prefixes they hold.

Paging: Kwon et al., 2023, https://arxiv.org/abs/2309.06180. Prefixes are found by a chain of hashes over full blocks,
as in vLLM (https://docs.vllm.ai/en/latest/design/prefix_caching.html).
"""

import hashlib
from array import array
from dataclasses import dataclass

from fastinfer.engine.sequence import Sequence
from fastinfer.models.kv_cache import num_blocks_for


@dataclass(frozen=True, slots=True)
class _Content:
    """A full block that is computed: its key, and its tokens, which a hit compares."""

    key: bytes
    tokens: bytes


class BlockManager:
    """Hands out blocks to sequences. Each block is in one of three states:

    - used: at least one sequence holds it;
    - cached: nobody holds it, and a later sequence may find its content; taken when no block is free, the one that was
      given back longest ago first;
    - free.

    A block is shared between sequences that begin with the same tokens. Full blocks are never written again; a forked
    sequence shares a partial block too, and whoever writes first into that gets a copy (``copies``).

    Args:
        num_blocks: of the cache.
        block_size: tokens per block.
        enable_prefix_caching: keep the content of full blocks findable.

    Attributes:
        copies: pairs (from, to) of blocks to be copied before the next step computes anything.
        num_queried_tokens, num_hit_tokens: of admitted sequences: all their tokens, and those found in the cache.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.copies: list[tuple[int, int]] = []
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        # A stack, with block 0 on top: blocks that were in use are used again before untouched memory.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: dict[int, None] = {}  # in the order in which they were given back
        self._ref_counts = [0] * num_blocks
        self._contents: list[_Content | None] = [None] * num_blocks
        self._by_key: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free) - len(self._cached)

    def can_allocate(self, sequence: Sequence, spare: int = 0) -> bool:
        """Whether all tokens of a waiting sequence fit and ``spare`` blocks are left over."""
        hits = self._find_prefix(sequence)
        available = len(self._free) + len(self._cached) - sum(block in self._cached for block in hits)
        return num_blocks_for(len(sequence), self.block_size) - len(hits) + spare <= available

    def allocate(self, sequence: Sequence) -> None:
        """Give a waiting sequence blocks for all its tokens: those that the cache has, which are computed then, and
        new ones for the rest.
        """
        hits = self._find_prefix(sequence)
        for block in hits:
            self._hold(block)
        sequence.blocks = hits
        sequence.num_cached_blocks = len(hits)
        sequence.num_computed_tokens = len(hits) * self.block_size
        sequence.num_prefill_tokens = len(sequence)
        sequence.draft_gap = 0
        self.num_queried_tokens += len(sequence)
        self.num_hit_tokens += sequence.num_computed_tokens
        self._grow(sequence, len(sequence))

    def can_append(self, sequence: Sequence, num_drafts: int = 0) -> bool:
        """Whether a running sequence's tokens, and drafts after them, have slots or can get them."""
        missing = num_blocks_for(len(sequence) + num_drafts, self.block_size) - len(sequence.blocks)
        return missing + self._writes_shared(sequence) <= len(self._free) + len(self._cached)

    def append(self, sequence: Sequence, num_drafts: int = 0) -> None:
        """Give a running sequence the blocks that its newest tokens need, if they need any."""
        if self._writes_shared(sequence):
            self._copy_block(sequence, sequence.num_computed_tokens // self.block_size)
        self._grow(sequence, len(sequence) + num_drafts)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let a child that has the same computed tokens as a running parent share its blocks, the partial one too."""
        child.blocks = parent.blocks[: num_blocks_for(parent.num_computed_tokens, self.block_size)]
        child.block_keys = list(parent.block_keys)
        child.num_cached_blocks = parent.num_cached_blocks
        child.num_computed_tokens = parent.num_computed_tokens
        child.num_prefill_tokens = parent.num_prefill_tokens
        child.draft_gap = parent.draft_gap
        for block in child.blocks:
            self._ref_counts[block] += 1

    def commit(self, sequence: Sequence) -> None:
        """Make the blocks that have become full findable; to be called when the computed tokens are the sequence's."""
        # A block is found with what both models have in it. Of accepted drafts a text may have taken only the first.
        num_tokens = min(sequence.num_computed_tokens - sequence.draft_gap, len(sequence))
        num_full = num_tokens // self.block_size
        if num_full > sequence.num_cached_blocks:
            if self.enable_prefix_caching:
                for index in range(sequence.num_cached_blocks, num_full):
                    # Of two sequences that computed the same tokens at the same time the first one's block is found.
                    key, tokens = self._key(sequence, index)
                    if key not in self._by_key:
                        self._by_key[key] = sequence.blocks[index]
                        self._contents[sequence.blocks[index]] = _Content(key, tokens)
            sequence.num_cached_blocks = num_full

    def publish(self, sequence: Sequence) -> None:
        """Let the sequence's own full blocks be found, where those of another one with the same tokens have been."""
        for index in range(sequence.num_cached_blocks):
            key, tokens = self._key(sequence, index)
            block, other = sequence.blocks[index], self._by_key.get(key)
            if other != block:
                if other is not None:
                    self._contents[other] = None
                    if other in self._cached:
                        del self._cached[other]
                        self._free.append(other)
                self._by_key[key] = block
                self._contents[block] = _Content(key, tokens)

    def free(self, sequence: Sequence) -> None:
        """Take back all blocks; of those that nobody else holds, the findable ones become cached, the others free."""
        # The end of a text is the first to go: without its beginning it could not be found.
        for block in reversed(sequence.blocks):
            self._release(block)
        sequence.blocks = []
        sequence.num_cached_blocks = 0
        sequence.num_computed_tokens = 0

    def reset_prefix_cache(self) -> None:
        """Forget all contents; used blocks stay with their sequences."""
        for block in self._by_key.values():
            self._contents[block] = None
        self._by_key.clear()
        self._free.extend(self._cached)
        self._cached.clear()

    def _find_prefix(self, sequence: Sequence) -> list[int]:
        """The cached blocks of a sequence's beginning; its last token stays to be computed, whose logits it wants."""
        hits: list[int] = []
        if self.enable_prefix_caching and sequence.reads_prefix:
            for index in range((len(sequence) - 1) // self.block_size):
                key, tokens = self._key(sequence, index)
                block = self._by_key.get(key)
                if block is None or self._contents[block] != _Content(key, tokens):
                    break
                hits.append(block)
        return hits

    def _key(self, sequence: Sequence, index: int) -> tuple[bytes, bytes]:
        """A full block's key, which depends on all tokens up to its end; and its tokens."""
        start = index * self.block_size
        tokens = array("q", sequence.token_ids[start : start + self.block_size]).tobytes()
        keys = sequence.block_keys
        if index == len(keys):
            keys.append(hashlib.sha256((keys[-1] if keys else sequence.cache_root) + tokens).digest())
        return keys[index], tokens

    def _writes_shared(self, sequence: Sequence) -> bool:
        """Whether the next token's slot lies in a block that others hold as well."""
        index = sequence.num_computed_tokens // self.block_size
        return index < len(sequence.blocks) and self._ref_counts[sequence.blocks[index]] > 1

    def _copy_block(self, sequence: Sequence, index: int) -> None:
        shared, own = sequence.blocks[index], self._take()
        self.copies.append((shared, own))
        sequence.blocks = [*sequence.blocks[:index], own, *sequence.blocks[index + 1 :]]
        self._release(shared)

    def _grow(self, sequence: Sequence, num_tokens: int) -> None:
        for _ in range(num_blocks_for(num_tokens, self.block_size) - len(sequence.blocks)):
            sequence.blocks.append(self._take())

    def _take(self) -> int:
        """A block for new content."""
        if self._free:
            block = self._free.pop()
        else:
            block = next(iter(self._cached))
            del self._cached[block]
            content = self._contents[block]
            assert content is not None
            del self._by_key[content.key]
            self._contents[block] = None
        self._ref_counts[block] = 1
        return block

    def _hold(self, block: int) -> None:
        self._ref_counts[block] += 1
        self._cached.pop(block, None)

    def _release(self, block: int) -> None:
        self._ref_counts[block] -= 1
        if self._ref_counts[block] == 0:
            if self._contents[block] is None:
                self._free.append(block)
            else:
                self._cached[block] = None
