"""The messages of rank 0 to the other ranks."""

from enum import IntEnum


class Message(IntEnum):
    """First word of a message; the other words follow.

    Attributes:
        STEP: compute a step: its slot, and its description, see :meth:`fastinfer.engine.runner.Runner.description`.
        COPY_BLOCKS: copy blocks: the group of layers, and for each copy the source and the target.
        LOGITS: compute logits of the last step in a slot: the slot, the first row, the number of rows, the adapter.
        ADAPTER: change a slot for adapters, see :class:`fastinfer.parallel.sharded_adapters.ShardedAdapterSlots`.
        READ_PART, WRITE_PART: copy a block or a slot of states to the memory that the ranks share, or from there: a
            :class:`fastinfer.engine.worker.CachePart`, and its number.
        RELEASE: free the KV cache and the recorded graphs: 1 for the model, too, 0 otherwise.
        RELOAD: load the model again, and report it as at the start.
        RESTORE: allocate the KV cache again.
    """

    STEP = 0
    COPY_BLOCKS = 1
    LOGITS = 2
    ADAPTER = 3
    READ_PART = 4
    WRITE_PART = 5
    RELEASE = 6
    RELOAD = 7
    RESTORE = 8
