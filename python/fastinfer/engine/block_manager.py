"""Allocation of the paged KV cache: which sequence holds which block, and which prefixes are cached.

Paging follows Kwon et al., 2023, https://arxiv.org/abs/2309.06180. Cached prefixes are found by the chain of hashes in
:mod:`fastinfer.engine.prefix_hash`.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence as List
from functools import partial

from fastinfer.engine.block_pool import BlockPool
from fastinfer.engine.block_table import BlockTable
from fastinfer.engine.chunk import Chunk
from fastinfer.engine.kv_offloading import KVOffloading
from fastinfer.engine.prefix_hash import BlockContent, PrefixScan, next_key, tokens_to_bytes
from fastinfer.engine.sequence import Sequence
from fastinfer.engine.state_manager import StateManager
from fastinfer.models.kv_cache import num_blocks_for


class BlockManager:
    """Allocates blocks to sequences and takes them back.

    Layers with the same attention window form a group, which has a pool of blocks, and every sequence has a table of
    blocks in each group. In a group with a window, a sequence gives back the blocks that none of its later tokens can
    see, and a prompt gets its blocks chunk by chunk.

    Sequences that begin with the same tokens share blocks. Full blocks are never written again. A forked sequence also
    shares its parent's partial block; the first of the two to write into that block gets a copy of it
    (``pending_copies``).

    A sequence of a model with layers of linear attention also has slots for its states. A prefix is then found only as
    far as there is a snapshot of the states, see :class:`fastinfer.engine.state_manager.StateManager`.

    If roles are separated, a block that was computed as generated tokens is not found as a part of a prompt, nor the
    other way round: their keys and values may differ in the last bits.

    Args:
        pools: the blocks of each group of layers. At most one of them has no window.
        block_size: tokens per block.
        enable_prefix_caching: whether later sequences may reuse the content of full blocks.
        offloading: stores of blocks beyond the cache; ``None`` for none.
        separates_roles: whether sequences share a block only if its tokens have the same roles in both, see
            :mod:`fastinfer.engine.roles`.
        states: manager of the slots for states; ``None`` for a model without layers of linear attention.

    Attributes:
        pools, block_size, enable_prefix_caching, states: see above.
        pending_copies: for each group, (source, destination) pairs of blocks to copy before the next step computes
            anything.
        num_queried_tokens: tokens of all admitted sequences.
        num_hit_tokens: those of them that the prefix cache already held.
    """

    def __init__(
        self,
        pools: List[BlockPool],
        block_size: int,
        enable_prefix_caching: bool = True,
        offloading: KVOffloading | None = None,
        *,
        separates_roles: bool = False,
        states: StateManager | None = None,
    ) -> None:
        self.pools = pools
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.states = states
        self.pending_copies: list[list[tuple[int, int]]] = [[] for _ in pools]
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self._offloading = offloading
        self._separates_roles = separates_roles
        self._all_pools = [*pools, *([] if states is None else [states.pool])]
        if offloading is not None:
            [pool] = pools
            pool.on_eviction = offloading.blocks.note_eviction
            if states is not None:
                states.pool.on_eviction = offloading.states.note_eviction
                states.on_use = offloading.states.note_use

    @property
    def num_blocks(self) -> int:
        """Number of blocks in all pools."""
        return sum(pool.num_blocks for pool in self.pools)

    @property
    def num_free(self) -> int:
        """Number of free blocks in all pools."""
        return sum(pool.num_free for pool in self.pools)

    @property
    def num_cached(self) -> int:
        """Number of cached blocks in all pools."""
        return sum(pool.num_cached for pool in self.pools)

    @property
    def num_used(self) -> int:
        """Number of blocks in all pools that at least one sequence holds."""
        return self.num_blocks - self.num_free - self.num_cached

    @property
    def num_available(self) -> int:
        """Number of blocks that can be taken from each pool, and of slots for states."""
        numbers = [pool.num_available for pool in self.pools]
        return min(numbers if self.states is None else [*numbers, self.states.num_available])

    def blocks_of(self, num_tokens: int) -> list[int]:
        """Return how many blocks of each pool a sequence of this length needs in order to run alone."""
        return [self._needed(pool, num_tokens) for pool in self.pools]

    def has_room(self, num_tokens: int, spare: int) -> bool:
        """Return whether a sequence of this length fits without the prefix cache and ``spare`` blocks remain."""
        has_blocks = all(self._needed(pool, num_tokens) + spare <= pool.num_available for pool in self.pools)
        return has_blocks and self._has_slot

    def can_allocate(self, sequence: Sequence, spare: int = 0) -> bool:
        """Return whether all tokens of a waiting sequence fit and at least ``spare`` blocks remain.

        A sequence that does not fit is asked for in every step. The answer then takes the same time at any length:
        the prefix is only looked up again once a bound says that the sequence may fit.
        """
        if not self._has_slot:
            return False
        # A block that is free or cached counts once, whether it is taken as it is or for its content. Only blocks that
        # running sequences hold are a gain; of those in a window, which are few, they are not counted.
        for pool in self.pools:
            missing = self._needed(pool, len(sequence)) + spare - pool.num_available
            if missing > 0 and (pool.window or not self._shares_at_least(missing, sequence, pool)):
                return False
        return True

    def allocate(self, sequence: Sequence) -> None:
        """Give a waiting sequence the cached blocks of its prefix, which count as computed.

        For the remaining tokens it gets new blocks in groups without a window; for the others see :meth:`extend`.
        """
        sequence.prefix_scan = None
        num_hits, tables, num_known = self._find_prefix(sequence)
        if self._restore_last_snapshot(sequence, num_hits, num_known) > num_hits:
            num_hits, tables, num_known = self._find_prefix(sequence)
        for pool, table in zip(self.pools, tables, strict=True):
            for block in table.held:
                pool.add_holder(block)
                self._note_use(pool, block)
        sequence.block_tables = tables
        sequence.num_cached_blocks = num_hits
        sequence.num_computed_tokens = num_hits * self.block_size
        sequence.num_prefill_tokens = len(sequence)
        sequence.draft_gap = 0
        if self.states is not None:
            prefix = self._content(sequence, num_hits - 1) if num_hits else None
            self.states.admit(sequence, prefix, num_known * self.block_size)
        self.num_queried_tokens += len(sequence)
        self.num_hit_tokens += sequence.num_computed_tokens
        for pool, table in zip(self.pools, tables, strict=True):
            if not pool.window:
                self._extend(pool, table, len(sequence))
        sequence.is_loading = self._offloading is not None and sequence.reads_prefix
        if sequence.states is not None:
            sequence.states.num_loaded_blocks = self._last_snapshot(sequence, num_known)
        self.load(sequence)

    def begin_step(self) -> None:
        """Allow as many blocks to be loaded from the stores as in any step."""
        if self._offloading is not None:
            self._offloading.begin_step()

    def load(self, sequence: Sequence) -> None:
        """Load the next blocks of an admitted sequence that ``is_loading`` from the stores, as many as a step may.

        The loaded tokens count as computed, of a model with states up to the last snapshot. The blocks become cached
        like computed ones, once a step that uses them has succeeded. Blocks that are in the prefix cache, behind one
        that is not or without a snapshot behind them, are copied.
        """
        if self._offloading is not None and sequence.is_loading:
            # The logits of the last token must be computed.
            end = (
                (len(sequence) - 1) // self.block_size if sequence.states is None else sequence.states.num_loaded_blocks
            )
            indices = range(sequence.num_computed_tokens // self.block_size, end)
            loadable = indices[: self._offloading.num_loadable]
            [pool], [table] = self.pools, sequence.block_tables
            contents = [self._content(sequence, index) for index in loadable]
            blocks = [
                (table.blocks[index], content, pool.find(content))
                for index, content in zip(loadable, contents, strict=True)
            ]
            num_loaded = self._offloading.load(blocks)
            sequence.is_loading = num_loaded == len(blocks) < len(indices)
            sequence.num_computed_tokens += num_loaded * self.block_size
            if not sequence.is_loading:
                self._continue_from_snapshot(sequence)

    def reuse_modules(self, sequence: Sequence) -> None:
        """Give a running prompt the cached blocks of modules that it would compute next, which count as computed.

        Modules before the first missing one were found when the prompt was admitted; these come after it.
        """
        layout = sequence.layout
        if layout is None or not self.enable_prefix_caching or not sequence.reads_prefix:
            return
        [pool], [table] = self.pools, sequence.block_tables
        while count := layout.num_module_blocks(sequence.num_computed_tokens):
            first = sequence.num_computed_tokens // self.block_size
            found = [pool.find(self._content(sequence, first + index)) for index in range(count)]
            blocks = [block for block in found if block is not None]
            if len(blocks) < count:
                return
            for block, replaced in zip(blocks, table.blocks[first : first + count], strict=True):
                pool.add_holder(block)
                pool.remove_holder(replaced)
                self._note_use(pool, block)
            table.blocks = [*table.blocks[:first], *blocks, *table.blocks[first + count :]]
            sequence.num_computed_tokens += count * self.block_size
            self.num_hit_tokens += count * self.block_size

    def extend(self, sequence: Sequence, num_tokens: int, spare: int) -> int:
        """Give a running prompt new blocks until they hold its first ``num_tokens`` tokens, or as many as have room.

        Args:
            sequence: the sequence.
            num_tokens: number of tokens.
            spare: number of blocks that must remain.

        Returns:
            The number of tokens that have room now, at most ``num_tokens``.
        """
        if self.states is not None and not self.states.reserve(sequence):
            return min(num_tokens, sequence.num_computed_tokens)
        for pool, table in zip(self.pools, sequence.block_tables, strict=True):
            room = len(table.blocks) + max(pool.num_available - spare, 0)
            num_tokens = min(num_tokens, room * self.block_size)
        for pool, table in zip(self.pools, sequence.block_tables, strict=True):
            self._extend(pool, table, num_tokens)
        return num_tokens

    def append(self, sequence: Sequence, num_drafts: int = 0) -> bool:
        """Give a running sequence any new blocks that its newest tokens and ``num_drafts`` drafts need.

        Returns:
            Whether there was room; if not, the sequence has no new blocks.
        """
        if self.states is not None and not self.states.reserve(sequence, num_drafts):
            return False
        num_tokens = sequence.num_tokens + num_drafts
        if num_tokens <= sequence.num_writable_tokens:
            return True
        num_blocks = num_blocks_for(num_tokens, self.block_size)
        written = sequence.num_computed_tokens // self.block_size
        copies = []  # groups in which another sequence holds the block of the next token's slot, too
        for group, (pool, table) in enumerate(zip(self.pools, sequence.block_tables, strict=True)):
            missing = num_blocks - len(table.blocks)
            if written < len(table.blocks) and pool.num_holders(table.blocks[written]) > 1:
                copies.append(group)
                missing = max(missing, 0) + 1
            if missing > 0 and missing > pool.num_available:
                return False
        for group in copies:
            self._copy_block(group, sequence.block_tables[group], written)
        for pool, table in zip(self.pools, sequence.block_tables, strict=True):
            if num_blocks > len(table.blocks):
                self._extend(pool, table, num_tokens)
        sequence.num_writable_tokens = num_blocks * self.block_size
        return True

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let a child share the blocks of a running parent with the same computed tokens, the partial block too."""
        num_blocks = num_blocks_for(parent.num_computed_tokens, self.block_size)
        parent.num_writable_tokens = 0  # as the partial block is shared from now on
        child.block_tables = [BlockTable(t.blocks[:num_blocks], t.num_dropped) for t in parent.block_tables]
        child.block_keys = list(parent.block_keys)
        child.num_cached_blocks = parent.num_cached_blocks
        child.num_computed_tokens = parent.num_computed_tokens
        child.num_prefill_tokens = parent.num_prefill_tokens
        child.draft_gap = parent.draft_gap
        for pool, table in zip(self.pools, child.block_tables, strict=True):
            for block in table.held:
                pool.add_holder(block)
        if self.states is not None:
            self.states.fork(parent, child)

    def place_states(self, chunks: List[Chunk]) -> None:
        """Set the slots that chunks read and write, right before a step computes them."""
        if self.states is not None:
            for chunk in chunks:
                self.states.place(chunk)

    def advance_states(self, chunk: Chunk, num_accepted: int = 0) -> None:
        """Make the states after a chunk's last token, or its last accepted draft, those of its sequence."""
        if self.states is not None:
            self.states.advance(chunk, num_accepted)

    def end_step(self, sequence: Sequence) -> None:
        """Add blocks that have become full to the prefix cache, and give back those that no later token sees.

        Call this after the tokens that were computed have been appended to the sequence.
        """
        # A cached block must hold the keys and values of the draft model too. The sequence may also have ended within
        # the accepted drafts, so that fewer tokens were appended than computed.
        num_tokens = min(sequence.num_computed_tokens - sequence.draft_gap, len(sequence))
        num_full = num_tokens // self.block_size
        if num_full > sequence.num_cached_blocks:
            for pool, table in zip(self.pools, sequence.block_tables, strict=True):
                if self.enable_prefix_caching:
                    for index in range(max(sequence.num_cached_blocks, table.num_dropped), num_full):
                        pool.publish(table.blocks[index], self._content(sequence, index))
                        self._note_use(pool, table.blocks[index])
                # Not those that the partial block alone no longer sees: a prefix that is found ends with a full block.
                self._drop(pool, table, num_full * self.block_size)
            sequence.num_cached_blocks = num_full
        if self.states is not None:
            self.states.publish(sequence, partial(self._content, sequence))

    def pin(self, sequence: Sequence) -> None:
        """Let a sequence that has ended hold the full blocks that the prefix cache finds for it, instead of copies."""
        for pool, table in zip(self.pools, sequence.block_tables, strict=True):
            blocks = list(table.blocks)
            for index in range(table.num_dropped, sequence.num_cached_blocks):
                content, own = self._content(sequence, index), blocks[index]
                found = pool.find(content)
                if found is None:
                    pool.publish(own, content)
                elif found != own:
                    pool.add_holder(found)
                    pool.remove_holder(own)
                    blocks[index] = found
            table.blocks = blocks
        if self.states is not None:  # for the same prompt, and for others that begin with all of its full blocks
            last = {(len(sequence) - 1) // self.block_size, len(sequence) // self.block_size} - {0}
            self.states.pin(sequence, [self._content(sequence, count - 1) for count in last])

    def free(self, sequence: Sequence) -> None:
        """Release all blocks of a sequence.

        A block that no other sequence holds becomes cached if the prefix cache knows its content, and free otherwise.
        """
        # The last block is released first, and so reused first: a block is of no use once an earlier one is gone.
        for pool, table in zip(self.pools, sequence.block_tables, strict=False):
            for block in reversed(table.held):
                pool.remove_holder(block)
        sequence.block_tables = []
        if self.states is not None:
            self.states.free(sequence)
        sequence.num_cached_blocks = 0
        sequence.num_computed_tokens = 0
        sequence.num_writable_tokens = 0

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache; sequences keep the blocks that they hold."""
        for pool in self._all_pools:
            pool.forget_contents()

    def rebuild(self, holders: list[Sequence]) -> None:
        """Rebuild the books from the sequences that hold blocks, after an error at an arbitrary point.

        Args:
            holders: the only sequences that keep their blocks.
        """
        for group, pool in enumerate(self.pools):
            pool.rebuild(Counter(block for holder in holders for block in holder.block_tables[group].held))
        self.pending_copies = [[] for _ in self.pools]
        if self.states is not None:
            self.states.rebuild(holders)
        if self._offloading is not None:
            self._offloading.forget()

    @property
    def _has_slot(self) -> bool:
        """Whether another sequence can have a slot for its states, if it needs any."""
        return self.states is None or self.states.num_available > 0

    def _needed(self, pool: BlockPool, num_tokens: int) -> int:
        """Return how many blocks a sequence of this length needs in order to run alone."""
        num_blocks = num_blocks_for(num_tokens, self.block_size)
        return min(num_blocks, num_blocks_for(pool.window, self.block_size) + 1) if pool.window else num_blocks

    def _shares_at_least(self, num_blocks: int, sequence: Sequence, pool: BlockPool) -> bool:
        """Return whether a waiting sequence can share this many blocks of a pool with running ones."""
        if self._max_shared(sequence, pool) < num_blocks:
            return False
        num_hits, _, _ = self._find_prefix(sequence)
        scan = sequence.prefix_scan = self._new_scan(pool)
        self._continue_scan(scan, sequence, pool)
        scan.num_hits = num_hits
        return self._max_shared(sequence, pool) >= num_blocks

    def _max_shared(self, sequence: Sequence, pool: BlockPool) -> int:
        """Return an upper bound of the number of blocks that a waiting sequence could share with running ones."""
        if not self.enable_prefix_caching or not sequence.reads_prefix:
            return 0
        scan = sequence.prefix_scan
        if scan is None:
            scan = sequence.prefix_scan = self._new_scan(pool)
        for place, other in enumerate(self._all_pools):
            # More of the known blocks may count as computed: up to a snapshot, or to where a block leaves its window.
            reach = num_blocks_for(other.window, self.block_size) + 1
            for key in other.keys_since(scan.num_published[place]):
                if (index := scan.indices.get(key)) is not None:
                    scan.num_hits = max(scan.num_hits, index + reach)
                    scan.num_recomputed += other is pool
            scan.num_published[place] = other.num_published
        self._continue_scan(scan, sequence, pool)
        num_hits = min(scan.num_hits, len(scan.num_used))
        num_used = scan.num_used[num_hits - 1] if num_hits else 0
        return min(num_used + scan.num_recomputed + pool.num_acquired - scan.num_acquired, num_hits)

    def _new_scan(self, pool: BlockPool) -> PrefixScan:
        return PrefixScan(pool.num_acquired, [other.num_published for other in self._all_pools])

    def _continue_scan(self, scan: PrefixScan, sequence: Sequence, pool: BlockPool) -> None:
        """Look up the blocks behind those that a scan has found, up to the first one that the pool does not have."""
        for index in range(len(scan.num_used), (len(sequence) - 1) // self.block_size):
            key = self._key(sequence, index)
            num_holders = pool.holders_of_key(key)
            if num_holders is None:
                break
            scan.num_used.append((scan.num_used[-1] if index else 0) + (num_holders > 0))
            scan.indices[key] = index
            if self.states is None or self.states.pool.holders_of_key(key) is not None:
                scan.num_hits = index + 1

    def _find_prefix(self, sequence: Sequence) -> tuple[int, list[BlockTable], int]:
        """Return the cached blocks of a sequence's prefix, without its last token, whose logits must be computed.

        Returns:
            The number of blocks that count as computed, their tables, and the number of blocks whose keys and values
            are in the cache, which is larger if there is no snapshot of the states after them. In a group with a
            window only those blocks must be in the cache that later tokens see.
        """
        if not self.enable_prefix_caching or not sequence.reads_prefix:
            return 0, [BlockTable() for _ in self.pools], 0
        found: list[list[int | None]] = [[] for _ in self.pools]
        ends = [0] * len(self.pools)  # for each group with a window, the end of its last gap
        num_hits = num_known = 0
        for index in range((len(sequence) - 1) // self.block_size):
            content = self._content(sequence, index)
            blocks = [pool.find(content) for pool in self.pools]
            if any(block is None and not pool.window for pool, block in zip(self.pools, blocks, strict=True)):
                break
            for group, block in enumerate(blocks):
                found[group].append(block)
                if block is None:
                    ends[group] = index + 1
            computed = (index + 1) * self.block_size
            dropped = [pool.num_dropped(computed, self.block_size) for pool in self.pools]
            is_whole = sequence.images is None or sequence.images.chunk_end(computed) == computed
            if is_whole and all(end <= first for end, first in zip(ends, dropped, strict=True)):
                num_known = index + 1
                if self.states is None or self.states.has_snapshot(content):
                    num_hits = num_known
        tables = []
        for pool, blocks in zip(self.pools, found, strict=True):
            num_dropped = pool.num_dropped(num_hits * self.block_size, self.block_size)
            kept = [block for block in blocks[num_dropped:num_hits] if block is not None]
            tables.append(BlockTable([0] * num_dropped + kept, num_dropped))
        return num_hits, tables, num_known

    def _content(self, sequence: Sequence, index: int) -> BlockContent:
        """Return the content of a sequence's full block."""
        return BlockContent(self._key(sequence, index), self._tokens(sequence, index))

    def _key(self, sequence: Sequence, index: int) -> bytes:
        """Return the key of a sequence's full block; each key is computed once and kept in the sequence."""
        keys = sequence.block_keys
        while len(keys) <= index:
            keys.append(next_key(sequence.previous_key, self._tokens(sequence, len(keys))))
        return keys[index]

    def _tokens(self, sequence: Sequence, index: int) -> bytes:
        """Return the tokens of a sequence's full block, those of images as their contents.

        Generated tokens are negative if roles are separated.
        """
        start = index * self.block_size
        tokens = sequence.token_ids[start : start + self.block_size]
        num_prompt = max(sequence.num_prompt_tokens - start, 0)
        if self._separates_roles and num_prompt < self.block_size:
            tokens[num_prompt:] = [-1 - token_id for token_id in tokens[num_prompt:]]
        if sequence.images is not None:
            sequence.images.mark(tokens, start)
        return tokens_to_bytes(tokens)

    def _last_snapshot(self, sequence: Sequence, num_known: int) -> int:
        """Return up to which block of an admitted sequence's prefix there is a snapshot, in the stores or in the cache.

        The result is the number of blocks that count as computed, if there is none behind them.

        Args:
            sequence: the sequence.
            num_known: number of blocks that the prefix cache has, behind which snapshots have been looked for already.
        """
        offloading, states = self._offloading, self.states
        if offloading is None or states is None or not sequence.reads_prefix:
            return sequence.num_cached_blocks
        [pool] = self.pools

        def is_nowhere(index: int) -> bool:
            content = self._content(sequence, index)
            return pool.find(content) is None and not offloading.blocks.contains(content)

        # Loading ends at the first block that is nowhere. Bisection finds one that is not before it.
        end = bisect_left(range((len(sequence) - 1) // self.block_size), True, lo=num_known, key=is_nowhere)
        for count in range(end, num_known, -1):
            content = self._content(sequence, count - 1)
            if states.has_snapshot(content) or offloading.states.contains(content):
                return count
        return sequence.num_cached_blocks

    def _restore_last_snapshot(self, sequence: Sequence, first: int, last: int) -> int:
        """Put the last snapshot between two blocks back into the prefix cache, if it is in the stores alone.

        Args:
            sequence: the sequence, which loses its own slots for the snapshot, if it has any.
            first, last: numbers of blocks of its prefix.

        Returns:
            The number of blocks before the last snapshot, ``first`` if there is none behind these.
        """
        if self._offloading is None or self.states is None or not sequence.reads_prefix:
            return first
        for count in range(last, first, -1):
            content = self._content(sequence, count - 1)
            if self.states.has_snapshot(content):
                return count
            if (data := self._offloading.states.find(content)) is not None:
                self.states.free(sequence)  # a slot is available then
                self.states.add_snapshot(content, partial(self._offloading.restore_snapshot, data))
                return count
        return first

    def _continue_from_snapshot(self, sequence: Sequence) -> None:
        """Let a sequence whose blocks were loaded continue from the last snapshot behind one of them, if it has states.

        Blocks behind it are computed again.
        """
        if self.states is None or sequence.states is None:
            return
        num_shared_tokens = sequence.states.num_shared_tokens
        first, last = sequence.num_cached_blocks, sequence.num_computed_tokens // self.block_size
        count = self._restore_last_snapshot(sequence, first, last)
        if count > first:
            self.states.free(sequence)
            self.states.admit(sequence, self._content(sequence, count - 1), num_shared_tokens)
        sequence.num_computed_tokens = count * self.block_size

    def _copy_block(self, group: int, table: BlockTable, index: int) -> None:
        """Replace a shared block of a sequence by a new one, and request a copy of its content."""
        pool = self.pools[group]
        shared, own = table.blocks[index], pool.take()
        self.pending_copies[group].append((shared, own))
        table.blocks = [*table.blocks[:index], own, *table.blocks[index + 1 :]]
        pool.remove_holder(shared)

    def _extend(self, pool: BlockPool, table: BlockTable, num_tokens: int) -> None:
        """Add new blocks to a table until they hold ``num_tokens`` tokens."""
        for _ in range(num_blocks_for(num_tokens, self.block_size) - len(table.blocks)):
            table.blocks.append(pool.take())

    def _drop(self, pool: BlockPool, table: BlockTable, num_computed_tokens: int) -> None:
        """Give back the blocks of a table that no token after the computed ones sees."""
        for index in range(table.num_dropped, pool.num_dropped(num_computed_tokens, self.block_size)):
            table.num_dropped = index + 1
            pool.remove_holder(table.blocks[index])

    def _note_use(self, pool: BlockPool, block: int) -> None:
        """Tell the stores that a sequence has computed or found a cached block."""
        content = pool.content(block)
        if self._offloading is not None and content is not None:
            self._offloading.blocks.note_use(block, content)
