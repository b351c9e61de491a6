"""Allocation of the slots for states: which sequence holds which slot, and which snapshots are cached."""

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as List

from fastinfer.engine.block_pool import BlockPool
from fastinfer.engine.chunk import Chunk
from fastinfer.engine.prefix_hash import BlockContent
from fastinfer.engine.sequence import Sequence
from fastinfer.engine.state_table import Snapshot, StateTable

# One in this many slots may have an outdated snapshot when there is no free slot. With none, prompts that are often
# asked again were found less often than without this rule; with a quarter, chats in turns were.
OUTDATED_SHARE = 8


class StateManager:
    """Gives slots to sequences of a model whose layers with linear attention have states.

    A slot holds the states of all these layers after one token. A sequence needs one slot: a step reads the states and
    writes the new ones in their place. It writes them to another slot if somebody else needs the old ones: a fork, or
    the prefix cache. With drafts, the states after each draft go to a slot of their own, as any draft may be the last
    one that is accepted.

    Snapshots are slots in the prefix cache, under the content of the block that ends with their last token. A sequence
    makes them

    - before the last token of its prompt, for the same prompt again;
    - where its prompt's beginning left the prefix cache of keys and values, for others with the same beginning;
    - at every end of a block that it reaches with the last token of a step. The newest of these replaces the one
      before, so that a sequence leaves no more than one.

    A snapshot is outdated once its text has a later one, as the next turn of a chat needs the last one alone; but not
    if several texts went on from it, or others are known to have the same beginning. If no slot is free, the snapshot
    that was outdated longest ago is dropped; the newest of them, an eighth of the slots, stay for the same prompt
    again. If there are no others, the snapshot that was released longest ago is dropped.

    No running sequence needs more than one slot as long as nobody shares it: if all slots are in use, it writes over
    its snapshot, which is then lost.

    Args:
        num_slots: number of slots.
        block_size: tokens per block of the KV cache.
        enable_prefix_caching: whether to make snapshots.

    Attributes:
        pool: holders and contents of the slots.
        on_use: function that is called with a slot and its content when a sequence has made a snapshot that stays, also
            its newest one at its end; ``None`` for none.
    """

    def __init__(self, num_slots: int, block_size: int, *, enable_prefix_caching: bool) -> None:
        self.pool = BlockPool(num_slots)
        self.on_use: Callable[[int, BlockContent], None] | None = None
        self._block_size = block_size
        self._makes_snapshots = enable_prefix_caching
        # By their slots, which may have no content by now.
        self._outdated: dict[int, BlockContent] = {}
        self._branches: dict[int, BlockContent] = {}  # from which several texts went on

    @property
    def num_available(self) -> int:
        """Number of slots that can be taken."""
        return self.pool.num_available

    def has_snapshot(self, content: BlockContent) -> bool:
        """Return whether there is a snapshot at the end of the block with this content."""
        return self.pool.find(content) is not None

    def add_snapshot(self, content: BlockContent, write: Callable[[int], None]) -> None:
        """Add a snapshot to the prefix cache; a slot must be available.

        Args:
            content: content of the block at whose end the snapshot is.
            write: function that writes the snapshot to a slot. If it raises an error, nothing is added.
        """
        slot = self._take()
        write(slot)
        self.pool.publish(slot, content)
        self.pool.remove_holder(slot)

    def admit(self, sequence: Sequence, prefix: BlockContent | None, num_shared_tokens: int) -> None:
        """Give a waiting sequence the states of its prefix and a slot for the next ones; one must be available.

        Args:
            sequence: the sequence.
            prefix: content of the last block of the prefix that counts as computed, which has a snapshot; ``None``
                without one.
            num_shared_tokens: see :class:`fastinfer.engine.state_table.StateTable`.
        """
        table = sequence.states = StateTable(num_shared_tokens=num_shared_tokens)
        if prefix is not None:
            table.current = self.pool.find(prefix)
            assert table.current is not None
            self.pool.add_holder(table.current)
            if self._outdated.get(table.current) == prefix:
                del self._outdated[table.current]
                self._branches[table.current] = prefix
            table.newest = prefix
        self.reserve(sequence)

    def reserve(self, sequence: Sequence, num_drafts: int = 0) -> bool:
        """Reserve the slots that a running sequence's next chunk writes to, one more than there are drafts.

        Returns:
            Whether there was room.
        """
        table, pool = self._table(sequence), self.pool
        while len(table.drafts) > num_drafts:
            pool.remove_holder(table.drafts.pop())
        if table.next is None:
            table.next = self._next_slot(table)
        missing = num_drafts - len(table.drafts)
        if table.next is None or missing > pool.num_available:
            return False
        table.drafts += [self._take() for _ in range(missing)]
        return True

    def place(self, chunk: Chunk) -> None:
        """Set which slot a chunk reads, and to which slots it writes; its drafts are known, and slots are reserved."""
        table = self._table(chunk.sequence)
        assert table.next is not None
        chunk.state_read = -1 if table.current is None else table.current
        num_drafts = len(chunk.drafts)
        writes = [*[-1] * (chunk.num_tokens - 1), table.next, *table.drafts[:num_drafts]]
        for num_tokens in self._borders_within(chunk, table):
            if self.pool.num_available:
                slot = writes[num_tokens - chunk.start - 1] = self._take()
                table.snapshots.append(Snapshot(num_tokens, slot))
        chunk.state_writes = writes

    def advance(self, chunk: Chunk, num_accepted: int = 0) -> None:
        """Make the states after a chunk's last token, or its last accepted draft, those of its sequence.

        Slots that are not needed any more may be given to others at once: what these write comes after this step.
        """
        table, pool = self._table(chunk.sequence), self.pool
        assert table.next is not None
        slots = [table.next, *table.drafts]
        end = chunk.start + chunk.num_tokens
        for num_tokens, slot in enumerate(slots[: num_accepted + 1], start=end):
            if self._makes_snapshots and num_tokens % self._block_size == 0:
                pool.add_holder(slot)
                table.snapshots.append(Snapshot(num_tokens, slot))
        last = slots[num_accepted]
        old = [] if table.current is None else [table.current]
        for slot in {*old, *slots} - {last}:
            pool.remove_holder(slot)
        table.current, table.next, table.drafts = last, None, []

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let a child share the states of a parent with the same computed tokens."""
        current = self._table(parent).current
        assert current is not None
        self.pool.add_holder(current)
        child.states = StateTable(current)

    def publish(self, sequence: Sequence, content_of: Callable[[int], BlockContent]) -> None:
        """Add the sequence's snapshots to the prefix cache, after the tokens that were computed have been appended.

        Args:
            sequence: the sequence.
            content_of: function from the index of a full block of the sequence to its content.
        """
        table, pool = self._table(sequence), self.pool
        while table.snapshots:
            num_tokens, slot = table.snapshots.pop(0)
            if num_tokens <= len(sequence):  # the text may have ended within the accepted drafts
                content = content_of(num_tokens // self._block_size - 1)
                pool.publish(slot, content)
                if num_tokens not in self._kept(sequence, table):
                    self._replace_rolling(table, slot, content)
                elif self.on_use is not None:
                    self.on_use(slot, content)
                self._outdate(table.newest, content)
                table.newest = None if num_tokens == table.num_shared_tokens else content
            pool.remove_holder(slot)

    def pin(self, sequence: Sequence, contents: List[BlockContent]) -> None:
        """Let a sequence that has ended hold the snapshots at the ends of these blocks, and nothing else."""
        found = [slot for content in contents if (slot := self.pool.find(content)) is not None]
        for slot in found:
            self.pool.add_holder(slot)
        self.free(sequence)
        sequence.states = StateTable(pinned=found)

    def free(self, sequence: Sequence) -> None:
        """Release all slots of a sequence, if it has any."""
        table = sequence.states
        if table is not None:
            if table.rolling is not None and self.on_use is not None:
                slot, content = table.rolling
                if self.pool.find(content) == slot:
                    self.on_use(slot, content)
            for slot in table.held:
                self.pool.remove_holder(slot)
            sequence.states = None

    def rebuild(self, holders: List[Sequence]) -> None:
        """Rebuild the books from the sequences that hold slots, after an error at an arbitrary point."""
        self.pool.rebuild(Counter(slot for holder in holders if holder.states for slot in holder.states.held))

    def _table(self, sequence: Sequence) -> StateTable:
        assert sequence.states is not None
        return sequence.states

    def _next_slot(self, table: StateTable) -> int | None:
        """Return a slot for the next states, ``None`` if there is none."""
        pool, current = self.pool, table.current
        is_own = current is not None and pool.num_holders(current) == 1
        if current is not None and is_own and pool.content(current) is None:
            return current
        if pool.num_available:
            return self._take()
        if current is not None and is_own:
            pool.evict(current)
            return current
        return None

    def _take(self) -> int:
        """Return a slot for new states; one must be available."""
        pool = self.pool
        while len(self._outdated) > pool.num_blocks // OUTDATED_SHARE and not pool.num_free:
            slot = next(iter(self._outdated))
            if pool.content(slot) == self._outdated.pop(slot) and not pool.num_holders(slot):
                pool.evict(slot)
        slot = pool.take()
        self._outdated.pop(slot, None)
        self._branches.pop(slot, None)
        return slot

    def _outdate(self, old: BlockContent | None, new: BlockContent) -> None:
        """Note that the text of a snapshot, if there is one, has a later snapshot now."""
        slot = None if old is None or old == new else self.pool.find(old)
        if old is not None and slot is not None and self._branches.get(slot) != old:
            self._outdated.pop(slot, None)  # the one that was outdated longest ago is dropped first
            self._outdated[slot] = old

    def _borders_within(self, chunk: Chunk, table: StateTable) -> list[int]:
        """Return after how many tokens there are snapshots to make before the chunk's last token."""
        if not self._makes_snapshots or chunk.num_tokens == 1:
            return []
        end = chunk.start + chunk.num_tokens
        wanted = {*self._kept(chunk.sequence, table)}
        if chunk.is_last:
            wanted.add(end // self._block_size * self._block_size)
        # The end of the prompt may lie within a block and, after a preemption, within the chunk.
        return sorted(border for border in wanted if chunk.start < border < end and border % self._block_size == 0)

    def _kept(self, sequence: Sequence, table: StateTable) -> tuple[int, ...]:
        """Return after how many tokens there are snapshots that no later one replaces."""
        size = sequence.num_prompt_tokens
        return (size - 1) // self._block_size * self._block_size, size, table.num_shared_tokens

    def _replace_rolling(self, table: StateTable, slot: int, content: BlockContent) -> None:
        """Remove the last snapshot that may be replaced from the prefix cache, unless somebody uses it."""
        if table.rolling is not None:
            old_slot, old_content = table.rolling
            if self.pool.find(old_content) == old_slot and not self.pool.num_holders(old_slot):
                self.pool.forget(old_slot)
        table.rolling = slot, content
