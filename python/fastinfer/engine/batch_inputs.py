"""What one step computes, as tensors."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fastinfer.engine.scheduler import Chunk
from fastinfer.models.batch import Batch


@dataclass(frozen=True, slots=True)
class BatchSize:
    """The sizes of a batch, by which a recorded graph is found."""

    num_seqs: int
    num_tokens: int
    num_logits: int
    has_adapters: bool

    @classmethod
    def of(cls, chunks: list[Chunk]) -> "BatchSize":
        return cls(
            num_seqs=len(chunks),
            num_tokens=sum(chunk.num_tokens + len(chunk.drafts) for chunk in chunks),
            num_logits=sum(num_logits_rows(chunk) for chunk in chunks),
            has_adapters=any(chunk.sequence.adapter >= 0 for chunk in chunks),
        )


def num_logits_rows(chunk: Chunk) -> int:
    """Rows of logits that a chunk wants: one for each sequence that goes on from its last token, and one per draft."""
    return chunk.sequence.num_slots + len(chunk.drafts) if chunk.is_last and chunk.sequence.samples else 0


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the model computed, valid until the next step.

    Attributes:
        hidden: [tokens, hidden] of the last layer, before its norm.
        logits: [n, vocab], as many rows as :func:`num_logits_rows` says, chunk after chunk.
        recorded: whether they are the same tensors, and the logits fp32, whenever a step of this size comes.
    """

    hidden: Tensor
    logits: Tensor
    recorded: bool = False


class BatchInputs:
    """The memory in which batches are written down. It is always the same, as there a graph finds the next step; on a
    GPU it has a twin there, which :meth:`upload` brings up to date in one copy.

    Args:
        max_seqs, max_tokens, max_logits: of the largest batch.
        max_blocks: of one sequence.
        block_size: tokens per block of the cache.
        device: that computes.
    """

    def __init__(
        self, max_seqs: int, max_tokens: int, max_logits: int, max_blocks: int, block_size: int, device: str = "cpu"
    ) -> None:
        self.max_seqs = max_seqs
        self.max_tokens = max_tokens
        self.device = torch.device(device)
        self._block_size = block_size
        # The wide ones first, as they are aligned; the table last, as few of its rows are copied as a rule.
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
        # What each row of the table holds: a sequence's blocks, and how many of them.
        self._rows: list[tuple[list[int], int]] = [([], 0)] * max_seqs

    def fill(self, chunks: list[Chunk]) -> None:
        """Write down the step: row i is ``chunks[i]``, whose blocks are allocated."""
        end = row = 0
        for index, chunk in enumerate(chunks):
            sequence, start = chunk.sequence, end
            position = sequence.num_computed_tokens
            end += chunk.num_tokens + len(chunk.drafts)
            if end - start == 1:  # as a rule: 0.7 us, where slices take 11
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
        """Write down, behind a batch of this size, what makes it one of ``bucket`` tokens, sequences and rows of
        logits: tokens without a sequence, a slot or an adapter; sequences without queries; copies of the first row.
        """
        self._slot_mapping[size.num_tokens : bucket] = -1
        self._adapter_ids[size.num_tokens : bucket] = -1
        self._query_start[size.num_seqs + 1 : bucket + 1] = size.num_tokens
        self._seq_lens[size.num_seqs : bucket] = 0
        self._logits_indices[size.num_logits : bucket] = 0

    def upload(self, num_seqs: int) -> None:
        """Bring what was written to the GPU, with so many rows of the block table; nothing waits for the copy."""
        if self.device.type != "cpu":
            end = self._table_start + num_seqs * self._block_table.strides[0]
            self._memory[:end].copy_(torch.from_numpy(self._host[:end]).pin_memory(), non_blocking=True)

    def batch(self, size: BatchSize) -> Batch:
        """The first rows as tensors on the device, which see every later ``fill`` (and ``upload``)."""

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
        sequence, first = chunk.sequence, chunk.sequence.num_computed_tokens
        tokens = sequence.token_ids[first : first + chunk.num_tokens] + chunk.drafts
        positions = np.arange(first, first + len(tokens))
        blocks = np.asarray(sequence.blocks)[positions // self._block_size]
        self._token_ids[start:end] = tokens
        self._positions[start:end] = positions
        self._slot_mapping[start:end] = blocks * self._block_size + positions % self._block_size
        self._adapter_ids[start:end] = sequence.adapter

    def _fill_blocks(self, row: int, blocks: list[int]) -> None:
        """Write only what is new: a sequence's list of blocks grows at its end, or is replaced by another list."""
        known, count = self._rows[row]
        if known is not blocks:
            count = 0
        if count < len(blocks):
            self._block_table[row, count : len(blocks)] = blocks[count:]
            self._rows[row] = blocks, len(blocks)
