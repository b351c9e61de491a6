"""What one step computes, as tensors."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fastinfer.engine.scheduler import Chunk


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's tokens, flattened without padding, and where their keys and values lie in the cache.

    Attributes:
        token_ids: [tokens] int64.
        positions: [tokens] int64; in each token's sequence, from 0.
        query_start: [seqs + 1] int32; cumulative token counts of the sequences, from 0 to ``tokens``.
        seq_lens: [seqs] int32; cached length of each sequence, this step's tokens included.
        block_table: [seqs, max_blocks] int32; 0 past a sequence's blocks.
        slot_mapping: [tokens] int64; ``block * block_size + offset`` of each token.
        logits_indices: [n] int64; the rows of the flattened tokens whose logits are wanted.
        adapter_ids: [tokens] int32; each token's LoRA adapter, -1 for none; or ``None`` if no token has one.
    """

    token_ids: Tensor
    positions: Tensor
    query_start: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    logits_indices: Tensor
    adapter_ids: Tensor | None = None


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
            num_logits=sum(num_rows(chunk) for chunk in chunks),
            has_adapters=any(chunk.sequence.adapter >= 0 for chunk in chunks),
        )


def num_rows(chunk: Chunk) -> int:
    """Rows of logits that a chunk wants: one for each sequence that goes on from its last token, and one per draft."""
    return chunk.sequence.num_slots + len(chunk.drafts) if chunk.is_last and chunk.sequence.samples else 0


class BatchInputs:
    """The memory in which batches are written down. It is always the same, as there a recorded graph finds the next
    step.

    Args:
        max_seqs, max_tokens, max_logits: of the largest batch.
        max_blocks: of one sequence.
        block_size: tokens per block of the cache.
    """

    def __init__(self, max_seqs: int, max_tokens: int, max_logits: int, max_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._token_ids = np.zeros(max_tokens, dtype=np.int64)
        self._positions = np.zeros(max_tokens, dtype=np.int64)
        self._slot_mapping = np.zeros(max_tokens, dtype=np.int64)
        self._adapter_ids = np.zeros(max_tokens, dtype=np.int32)
        self._query_start = np.zeros(max_seqs + 1, dtype=np.int32)
        self._seq_lens = np.zeros(max_seqs, dtype=np.int32)
        self._block_table = np.zeros((max_seqs, max_blocks), dtype=np.int32)
        self._logits_indices = np.zeros(max_logits, dtype=np.int64)
        # What each row of the table holds: a sequence's blocks, and how many of them.
        self._rows: list[tuple[list[int], int]] = [([], 0)] * max_seqs

    def fill(self, chunks: list[Chunk]) -> None:
        """Write down the step: row i is ``chunks[i]``, whose blocks are allocated."""
        end = row = 0
        for index, chunk in enumerate(chunks):
            sequence, start = chunk.sequence, end
            position = sequence.num_computed_tokens
            end += chunk.num_tokens + len(chunk.drafts)
            if end - start == 1:  # as a rule, and five times as fast as with slices
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
            if rows := num_rows(chunk):
                last = start + chunk.num_tokens - 1
                slots = sequence.num_slots
                self._logits_indices[row : row + slots] = last
                self._logits_indices[row + slots : row + rows] = range(last + 1, end)
                row += rows

    def batch(self, size: BatchSize) -> Batch:
        """The first rows as tensors that see every later ``fill``."""

        def tensor(array: np.ndarray, length: int) -> Tensor:
            return torch.from_numpy(array[:length])

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
