"""The input tensors of a step."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fastinfer.engine.scheduler import Chunk
from fastinfer.models.batch import Batch


@dataclass(frozen=True, slots=True)
class BatchSize:
    """Sizes of a batch; recorded graphs are looked up by them.

    Attributes:
        num_seqs: number of sequences.
        num_tokens: number of tokens, drafts included.
        num_logits: number of rows of logits.
        has_adapters: whether any token has a LoRA adapter.
    """

    num_seqs: int
    num_tokens: int
    num_logits: int
    has_adapters: bool

    @classmethod
    def of(cls, chunks: list[Chunk]) -> "BatchSize":
        """Return the sizes of a step's batch."""
        return cls(
            num_seqs=len(chunks),
            num_tokens=sum(chunk.num_tokens + len(chunk.drafts) for chunk in chunks),
            num_logits=sum(num_logits_rows(chunk) for chunk in chunks),
            has_adapters=any(chunk.sequence.adapter >= 0 for chunk in chunks),
        )


def num_logits_rows(chunk: Chunk) -> int:
    """Return the number of rows of logits that a chunk needs.

    That is one for each sequence that continues from the chunk's last token, and one for each draft.
    """
    return chunk.sequence.num_slots + len(chunk.drafts) if chunk.is_last and chunk.sequence.samples else 0


@dataclass(frozen=True, slots=True)
class StepResult:
    """Results of the model, valid until the next step.

    Attributes:
        hidden: [tokens, hidden] output of the last layer, before the last norm.
        logits: [n, vocab], with :func:`num_logits_rows` rows for each chunk in turn.
        recorded: whether every step of this size returns the same tensors, with fp32 logits.
    """

    hidden: Tensor
    logits: Tensor
    recorded: bool = False


class BatchInputs:
    """Input tensors of all steps, at addresses that never change, so that recorded graphs can read them.

    The host writes them; for a GPU, :meth:`upload` copies them to the device in one transfer.

    Args:
        max_seqs: maximum number of sequences in a batch.
        max_tokens: maximum number of tokens in a batch.
        max_logits: maximum number of rows of logits in a batch.
        max_blocks: maximum number of blocks of one sequence.
        block_size: tokens per block of the cache.
        device: device that computes, ``"cpu"`` or ``"cuda"``.

    Attributes:
        max_seqs, max_tokens: see above.
        device: device that computes.
    """

    def __init__(
        self, max_seqs: int, max_tokens: int, max_logits: int, max_blocks: int, block_size: int, device: str = "cpu"
    ) -> None:
        self.max_seqs = max_seqs
        self.max_tokens = max_tokens
        self.device = torch.device(device)
        self._block_size = block_size
        # The int64 arrays come first, for their alignment. The block table comes last, as usually only few of its rows
        # have to be copied.
        longs, ints = 3 * max_tokens + max_logits, max_tokens + 2 * max_seqs + 1
        self._table_start = 8 * longs + 4 * ints
        self._host = np.zeros(self._table_start + 4 * max_seqs * max_blocks, np.uint8)
        wide = self._host[: 8 * longs].view(np.int64)
        narrow = self._host[8 * longs : self._table_start].view(np.int32)
        self._token_ids, self._positions, self._slot_mapping, self._logits_indices = np.split(
            wide, [max_tokens, 2 * max_tokens, 3 * max_tokens]
        )
        self._adapter_ids, self._seq_lens, self._query_start = np.split(narrow, [max_tokens, max_tokens + max_seqs])
        self._block_table = self._host[self._table_start :].view(np.int32).reshape(max_seqs, max_blocks)
        host = torch.from_numpy(self._host)
        self._memory = host if self.device.type == "cpu" else host.to(self.device)
        # For each row of the block table: the list of blocks that was written last, and how many of its entries.
        self._rows: list[tuple[list[int], int]] = [([], 0)] * max_seqs

    def fill(self, chunks: list[Chunk]) -> None:
        """Write the inputs of a step: sequence i is that of ``chunks[i]``, whose blocks are allocated already."""
        end = row = 0
        for index, chunk in enumerate(chunks):
            sequence, start = chunk.sequence, end
            position = sequence.num_computed_tokens
            end += chunk.num_tokens + len(chunk.drafts)
            if end - start == 1:  # the usual case: 0.7 us instead of 11 us with slices
                self._token_ids[start] = sequence.token_ids[position]
                self._positions[start] = position
                block = sequence.blocks[position // self._block_size]
                self._slot_mapping[start] = block * self._block_size + position % self._block_size
                self._adapter_ids[start] = sequence.adapter
            else:
                self._fill_tokens(chunk, start, end)
            self._query_start[index + 1] = end
            self._seq_lens[index] = position + end - start
            self._fill_blocks(index, sequence.blocks)
            if rows := num_logits_rows(chunk):
                last = start + chunk.num_tokens - 1
                slots = sequence.num_slots
                self._logits_indices[row : row + slots] = last
                self._logits_indices[row + slots : row + rows] = range(last + 1, end)
                row += rows

    def pad(self, size: BatchSize, bucket: int) -> None:
        """Pad the batch that was written last.

        Padding tokens belong to no sequence and have no slot and no adapter, padding sequences have no queries, and
        padding rows of logits repeat the first token's.

        Args:
            size: sizes of the batch.
            bucket: number of tokens, of sequences and of rows of logits after padding.
        """
        self._slot_mapping[size.num_tokens : bucket] = -1
        self._adapter_ids[size.num_tokens : bucket] = -1
        self._query_start[size.num_seqs + 1 : bucket + 1] = size.num_tokens
        self._seq_lens[size.num_seqs : bucket] = 0
        self._logits_indices[size.num_logits : bucket] = 0

    def upload(self, num_seqs: int) -> None:
        """Queue a copy of the inputs, with ``num_seqs`` rows of the block table, to the GPU; does nothing on a CPU."""
        if self.device.type != "cpu":
            end = self._table_start + num_seqs * self._block_table.strides[0]
            self._memory[:end].copy_(torch.from_numpy(self._host[:end]).pin_memory(), non_blocking=True)

    def batch(self, size: BatchSize) -> Batch:
        """Return a batch of this size as views of the input tensors, which later steps overwrite."""

        def tensor(array: np.ndarray, length: int) -> Tensor:
            start = array.ctypes.data - self._host.ctypes.data
            values = self._memory[start : start + array[:length].nbytes].view(torch.from_numpy(array[:0]).dtype)
            return values.view(length, *array.shape[1:])

        return Batch(
            token_ids=tensor(self._token_ids, size.num_tokens),
            positions=tensor(self._positions, size.num_tokens),
            query_start=tensor(self._query_start, size.num_seqs + 1),
            seq_lens=tensor(self._seq_lens, size.num_seqs),
            block_table=tensor(self._block_table, size.num_seqs),
            slot_mapping=tensor(self._slot_mapping, size.num_tokens),
            logits_indices=tensor(self._logits_indices, size.num_logits),
            adapter_ids=tensor(self._adapter_ids, size.num_tokens) if size.has_adapters else None,
        )

    def _fill_tokens(self, chunk: Chunk, start: int, end: int) -> None:
        """Write the inputs of a chunk's tokens, drafts included, to the rows ``start`` to ``end - 1``."""
        sequence, first = chunk.sequence, chunk.sequence.num_computed_tokens
        tokens = sequence.token_ids[first : first + chunk.num_tokens] + chunk.drafts
        positions = np.arange(first, first + len(tokens))
        blocks = np.asarray(sequence.blocks)[positions // self._block_size]
        self._token_ids[start:end] = tokens
        self._positions[start:end] = positions
        self._slot_mapping[start:end] = blocks * self._block_size + positions % self._block_size
        self._adapter_ids[start:end] = sequence.adapter

    def _fill_blocks(self, row: int, blocks: list[int]) -> None:
        """Write the new entries of a row of the block table.

        A sequence's list of blocks either grows at its end or is replaced by another list.
        """
        known, count = self._rows[row]
        if known is not blocks:
            count = 0
        if count < len(blocks):
            self._block_table[row, count : len(blocks)] = blocks[count:]
            self._rows[row] = blocks, len(blocks)
