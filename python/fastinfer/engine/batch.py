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
    """

    token_ids: Tensor
    positions: Tensor
    query_start: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    logits_indices: Tensor

    @classmethod
    def build(cls, chunks: list[Chunk], block_size: int, device: str) -> "Batch":
        """The batch of these chunks, whose blocks are allocated; every row of ``logits_indices`` ends a sequence."""
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        query_start = [0]
        seq_lens: list[int] = []
        logits_indices: list[int] = []
        block_table = np.zeros((len(chunks), max(len(chunk.sequence.blocks) for chunk in chunks)), dtype=np.int32)
        for row, chunk in enumerate(chunks):
            sequence = chunk.sequence
            blocks = sequence.blocks
            start = sequence.num_computed_tokens
            end = start + chunk.num_tokens
            token_ids += sequence.token_ids[start:end]
            positions += range(start, end)
            slots += [blocks[p // block_size] * block_size + p % block_size for p in range(start, end)]
            block_table[row, : len(blocks)] = blocks
            query_start.append(len(token_ids))
            seq_lens.append(end)
            if chunk.is_last:
                logits_indices.append(len(token_ids) - 1)
        return cls(
            token_ids=torch.tensor(token_ids, device=device),
            positions=torch.tensor(positions, device=device),
            query_start=torch.tensor(query_start, dtype=torch.int32, device=device),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
            block_table=torch.from_numpy(block_table).to(device),
            slot_mapping=torch.tensor(slots, device=device),
            # The dtype matters when the list is empty, as it is while a long prompt is in the middle.
            logits_indices=torch.tensor(logits_indices, dtype=torch.int64, device=device),
        )


class DecodeInputs:
    """The batches of steps that only decode, always in the same memory: there a recorded graph finds the next step.

    Args:
        max_seqs: sequences of the largest batch.
        max_blocks: of one sequence.
        block_size: tokens per block of the cache.
    """

    def __init__(self, max_seqs: int, max_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._token_ids = np.zeros(max_seqs, dtype=np.int64)
        self._positions = np.zeros(max_seqs, dtype=np.int64)
        self._slot_mapping = np.zeros(max_seqs, dtype=np.int64)
        self._seq_lens = np.zeros(max_seqs, dtype=np.int32)
        self._block_table = np.zeros((max_seqs, max_blocks), dtype=np.int32)
        # What each row of the table holds: a sequence's blocks, and how many of them.
        self._rows: list[tuple[list[int], int]] = [([], 0)] * max_seqs

    def fill(self, chunks: list[Chunk]) -> None:
        """Write down the step: row i is ``chunks[i]``, the newest token of its sequence."""
        for row, chunk in enumerate(chunks):
            sequence = chunk.sequence
            position = sequence.num_computed_tokens
            self._token_ids[row] = sequence.token_ids[position]
            self._positions[row] = position
            block = sequence.blocks[position // self._block_size]
            self._slot_mapping[row] = block * self._block_size + position % self._block_size
            self._seq_lens[row] = position + 1
            self._fill_blocks(row, sequence.blocks)

    def batch(self, num_seqs: int) -> Batch:
        """The first rows as tensors that see every later ``fill``."""
        return Batch(
            token_ids=torch.from_numpy(self._token_ids[:num_seqs]),
            positions=torch.from_numpy(self._positions[:num_seqs]),
            query_start=torch.arange(num_seqs + 1, dtype=torch.int32),
            seq_lens=torch.from_numpy(self._seq_lens[:num_seqs]),
            block_table=torch.from_numpy(self._block_table[:num_seqs]),
            slot_mapping=torch.from_numpy(self._slot_mapping[:num_seqs]),
            logits_indices=torch.arange(num_seqs),
        )

    def _fill_blocks(self, row: int, blocks: list[int]) -> None:
        """Write only what is new: a sequence's list of blocks grows at its end, or is replaced by another list."""
        known, count = self._rows[row]
        if known is not blocks:
            count = 0
        if count < len(blocks):
            self._block_table[row, count : len(blocks)] = blocks[count:]
            self._rows[row] = blocks, len(blocks)
