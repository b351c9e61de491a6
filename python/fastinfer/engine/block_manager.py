"""Allocation of the paged KV cache: which sequence holds which block, and which prefixes are cached.

Paging follows Kwon et al., 2023, https://arxiv.org/abs/2309.06180. Cached prefixes are found by the chain of hashes in
:mod:`fastinfer.engine.prefix_hash`.
"""

from collections import Counter

from fastinfer.engine.kv_offloading import KVOffloading
from fastinfer.engine.prefix_hash import BlockContent, PrefixScan, next_key, tokens_to_bytes
from fastinfer.engine.sequence import Sequence
from fastinfer.models.kv_cache import num_blocks_for


class BlockManager:
    """Allocates blocks to sequences and takes them back.

    Each block is in one of three states:

    - used: at least one sequence holds it;
    - cached: no sequence holds it, but a later one may find its content. When no block is free, the cached block that
      was released longest ago is reused;
    - free.

    Sequences that begin with the same tokens share blocks. Full blocks are never written again. A forked sequence also
    shares its parent's partial block; the first of the two to write into that block gets a copy of it
    (``pending_copies``).

    Args:
        num_blocks: number of blocks in the cache.
        block_size: tokens per block.
        enable_prefix_caching: whether later sequences may reuse the content of full blocks.
        offloading: stores of blocks beyond the cache; ``None`` for none.

    Attributes:
        pending_copies: (source, destination) pairs of blocks to copy before the next step computes anything.
        num_queried_tokens: tokens of all admitted sequences.
        num_hit_tokens: those of them that the prefix cache already held.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        offloading: KVOffloading | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.pending_copies: list[tuple[int, int]] = []
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self._offloading = offloading
        # A stack with block 0 on top, so that released blocks are reused before memory that was never touched.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: dict[int, None] = {}  # in the order of their release
        self._ref_counts = [0] * num_blocks
        self._contents: list[BlockContent | None] = [None] * num_blocks
        self._by_key: dict[bytes, int] = {}
        self._num_acquired = 0  # cached blocks that became used since the start

    @property
    def num_free(self) -> int:
        """Number of free blocks."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Number of cached blocks."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        """Number of blocks that at least one sequence holds."""
        return self.num_blocks - len(self._free) - len(self._cached)

    def can_allocate(self, sequence: Sequence, spare: int = 0) -> bool:
        """Return whether all tokens of a waiting sequence fit and at least ``spare`` blocks remain.

        A sequence that does not fit is asked for in every step. The answer then takes the same time at any length:
        the prefix is only looked up again once a bound says that the sequence may fit.
        """
        # A block that is free or cached counts once, whether it is taken as it is or for its content. Only blocks that
        # running sequences hold are a gain.
        available = len(self._free) + len(self._cached)
        missing = num_blocks_for(len(sequence), self.block_size) + spare - available
        if missing <= 0:
            return True
        if self._max_shared(sequence) < missing:
            return False
        hits = self._find_prefix(sequence)
        num_used = sum(self._ref_counts[block] > 0 for block in hits)
        sequence.prefix_scan = PrefixScan(len(hits), num_used, self._num_acquired)
        return num_used >= missing

    def allocate(self, sequence: Sequence) -> None:
        """Give a waiting sequence blocks for all its tokens.

        Cached blocks of its prefix count as computed; the remaining tokens get new blocks.
        """
        hits = self._find_prefix(sequence)
        for block in hits:
            self._add_reference(block)
            self._note_use(block)
        sequence.blocks = hits
        sequence.num_cached_blocks = len(hits)
        sequence.num_computed_tokens = len(hits) * self.block_size
        sequence.num_prefill_tokens = len(sequence)
        sequence.draft_gap = 0
        self.num_queried_tokens += len(sequence)
        self.num_hit_tokens += sequence.num_computed_tokens
        self._extend(sequence, len(sequence))
        sequence.is_loading = self._offloading is not None and sequence.reads_prefix
        self.load(sequence)

    def begin_step(self) -> None:
        """Allow as many blocks to be loaded from the stores as in any step."""
        if self._offloading is not None:
            self._offloading.begin_step()

    def load(self, sequence: Sequence) -> None:
        """Load the next blocks of an admitted sequence that ``is_loading`` from the stores, as many as a step may.

        The loaded tokens count as computed. The blocks become cached like computed ones, once a step that uses them has
        succeeded.
        """
        if self._offloading is not None and sequence.is_loading:
            # The logits of the last token must be computed.
            indices = range(sequence.num_computed_tokens // self.block_size, (len(sequence) - 1) // self.block_size)
            loadable = indices[: self._offloading.num_loadable]
            blocks = [(sequence.blocks[index], self._content(sequence, index)) for index in loadable]
            num_loaded = self._offloading.load(blocks)
            sequence.is_loading = num_loaded == len(blocks) < len(indices)
            sequence.num_computed_tokens += num_loaded * self.block_size

    def can_append(self, sequence: Sequence, num_drafts: int = 0) -> bool:
        """Return whether a running sequence has, or can get, slots for its tokens and ``num_drafts`` drafts."""
        missing = num_blocks_for(sequence.num_tokens + num_drafts, self.block_size) - len(sequence.blocks)
        return missing + self._writes_into_shared_block(sequence) <= len(self._free) + len(self._cached)

    def append(self, sequence: Sequence, num_drafts: int = 0) -> None:
        """Give a running sequence any new blocks that its newest tokens and ``num_drafts`` drafts need."""
        if self._writes_into_shared_block(sequence):
            self._copy_block(sequence, sequence.num_computed_tokens // self.block_size)
        self._extend(sequence, sequence.num_tokens + num_drafts)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let a child share the blocks of a running parent with the same computed tokens, the partial block too."""
        child.blocks = parent.blocks[: num_blocks_for(parent.num_computed_tokens, self.block_size)]
        child.block_keys = list(parent.block_keys)
        child.num_cached_blocks = parent.num_cached_blocks
        child.num_computed_tokens = parent.num_computed_tokens
        child.num_prefill_tokens = parent.num_prefill_tokens
        child.draft_gap = parent.draft_gap
        for block in child.blocks:
            self._ref_counts[block] += 1

    def cache_full_blocks(self, sequence: Sequence) -> None:
        """Add blocks that have become full to the prefix cache.

        Call this after the tokens that were computed have been appended to the sequence.
        """
        # A cached block must hold the keys and values of the draft model too. The sequence may also have ended within
        # the accepted drafts, so that fewer tokens were appended than computed.
        num_tokens = min(sequence.num_computed_tokens - sequence.draft_gap, len(sequence))
        num_full = num_tokens // self.block_size
        if num_full > sequence.num_cached_blocks:
            if self.enable_prefix_caching:
                for index in range(sequence.num_cached_blocks, num_full):
                    # If two sequences computed the same tokens at the same time, only the first one's block is cached.
                    content = self._content(sequence, index)
                    if content.key not in self._by_key:
                        self._by_key[content.key] = sequence.blocks[index]
                        self._contents[sequence.blocks[index]] = content
                        self._note_use(sequence.blocks[index])
            sequence.num_cached_blocks = num_full

    def prefer_blocks_of(self, sequence: Sequence) -> None:
        """Make the prefix cache refer to this sequence's full blocks instead of other blocks with the same content."""
        for index in range(sequence.num_cached_blocks):
            content = self._content(sequence, index)
            block, other = sequence.blocks[index], self._by_key.get(content.key)
            if other != block:
                if other is not None:
                    self._contents[other] = None
                    if other in self._cached:
                        del self._cached[other]
                        self._free.append(other)
                self._by_key[content.key] = block
                self._contents[block] = content

    def free(self, sequence: Sequence) -> None:
        """Release all blocks of a sequence.

        A block that no other sequence holds becomes cached if the prefix cache knows its content, and free otherwise.
        """
        # The last block is released first, and so reused first: a block is of no use once an earlier one is gone.
        for block in reversed(sequence.blocks):
            self._drop_reference(block)
        sequence.blocks = []
        sequence.num_cached_blocks = 0
        sequence.num_computed_tokens = 0

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache; sequences keep the blocks that they hold."""
        for block in self._by_key.values():
            self._contents[block] = None
        self._by_key.clear()
        self._free.extend(self._cached)
        self._cached.clear()

    def rebuild(self, holders: list[Sequence]) -> None:
        """Rebuild the books from the sequences that hold blocks, after an error at an arbitrary point.

        Of the prefix cache those entries stay on which its two tables agree.

        Args:
            holders: the only sequences that keep their blocks.
        """
        held = Counter(block for sequence in holders for block in sequence.blocks)
        self._ref_counts = [held[block] for block in range(self.num_blocks)]
        self._by_key = {key: block for key, block in self._by_key.items() if self._holds_key(block, key)}
        known = set(self._by_key.values())
        self._contents = [content if block in known else None for block, content in enumerate(self._contents)]
        self._cached = {block: None for block in [*self._cached, *known] if block in known and not held[block]}
        self._free = [b for b in range(self.num_blocks - 1, -1, -1) if b not in known and not held[b]]
        self.pending_copies.clear()
        if self._offloading is not None:
            self._offloading.forget()

    def _max_shared(self, sequence: Sequence) -> int:
        """Return a bound of the number of blocks that a waiting sequence could share with running ones.

        The bound is too low only if a block of the prefix was evicted and then computed again, by a sequence that still
        runs. The sequence then waits a little longer than it must.
        """
        if not self.enable_prefix_caching or not sequence.reads_prefix:
            return 0
        scan = sequence.prefix_scan
        if scan is None:
            scan = sequence.prefix_scan = PrefixScan(0, 0, self._num_acquired)
        while scan.num_blocks < (len(sequence) - 1) // self.block_size:
            block = self._by_key.get(self._key(sequence, scan.num_blocks))
            if block is None:
                break
            scan.num_blocks += 1
            scan.num_used += self._ref_counts[block] > 0
        return min(scan.num_used + self._num_acquired - scan.num_acquired, scan.num_blocks)

    def _holds_key(self, block: int, key: bytes) -> bool:
        content = self._contents[block]
        return content is not None and content.key == key

    def _find_prefix(self, sequence: Sequence) -> list[int]:
        """Return the cached blocks of a sequence's prefix, without its last token, whose logits must be computed."""
        hits: list[int] = []
        if self.enable_prefix_caching and sequence.reads_prefix:
            for index in range((len(sequence) - 1) // self.block_size):
                content = self._content(sequence, index)
                block = self._by_key.get(content.key)
                if block is None or self._contents[block] != content:
                    break
                hits.append(block)
        return hits

    def _content(self, sequence: Sequence, index: int) -> BlockContent:
        """Return the content of a sequence's full block."""
        return BlockContent(self._key(sequence, index), self._tokens(sequence, index))

    def _key(self, sequence: Sequence, index: int) -> bytes:
        """Return the key of a sequence's full block; each key is computed once and kept in the sequence."""
        keys = sequence.block_keys
        if index == len(keys):
            keys.append(next_key(keys[-1] if keys else sequence.first_key, self._tokens(sequence, index)))
        return keys[index]

    def _tokens(self, sequence: Sequence, index: int) -> bytes:
        """Return the tokens of a sequence's full block."""
        start = index * self.block_size
        return tokens_to_bytes(sequence.token_ids[start : start + self.block_size])

    def _writes_into_shared_block(self, sequence: Sequence) -> bool:
        """Return whether the next token's slot is in a block that another sequence holds too."""
        index = sequence.num_computed_tokens // self.block_size
        return index < len(sequence.blocks) and self._ref_counts[sequence.blocks[index]] > 1

    def _copy_block(self, sequence: Sequence, index: int) -> None:
        """Replace a shared block of a sequence by a new one, and request a copy of its content."""
        shared, own = sequence.blocks[index], self._take_block()
        self.pending_copies.append((shared, own))
        sequence.blocks = [*sequence.blocks[:index], own, *sequence.blocks[index + 1 :]]
        self._drop_reference(shared)

    def _extend(self, sequence: Sequence, num_tokens: int) -> None:
        """Give a sequence new blocks until they hold ``num_tokens`` tokens."""
        for _ in range(num_blocks_for(num_tokens, self.block_size) - len(sequence.blocks)):
            sequence.blocks.append(self._take_block())

    def _take_block(self) -> int:
        """Return a block for new content: a free one, or else the cached one that was released longest ago."""
        if self._free:
            block = self._free.pop()
        else:
            block = next(iter(self._cached))
            del self._cached[block]
            content = self._contents[block]
            assert content is not None
            if self._offloading is not None:
                self._offloading.note_eviction(block, content)
            del self._by_key[content.key]
            self._contents[block] = None
        self._ref_counts[block] = 1
        return block

    def _note_use(self, block: int) -> None:
        """Tell the stores that a sequence has computed or found a cached block."""
        content = self._contents[block]
        if self._offloading is not None and content is not None:
            self._offloading.note_use(block, content)

    def _add_reference(self, block: int) -> None:
        """Add a holder to a block; a cached block becomes used."""
        self._ref_counts[block] += 1
        if block in self._cached:
            del self._cached[block]
            self._num_acquired += 1

    def _drop_reference(self, block: int) -> None:
        """Remove a holder from a block; without holders it becomes cached or free."""
        self._ref_counts[block] -= 1
        if self._ref_counts[block] == 0:
            if self._contents[block] is None:
                self._free.append(block)
            else:
                self._cached[block] = None
