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
