"""What one step computes, as tensors."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's tokens, flattened without padding, and where their keys and values lie in the cache.

    Attributes:
        token_ids: [tokens] int64.
        positions: [tokens] int64; in each token's sequence, from 0.
        query_start: [seqs + 1] int32; cumulative token counts of the sequences, from 0 to ``tokens``.
        seq_lens: [seqs] int32; cached length of each sequence, this step's tokens included.
        block_table: [seqs, max_blocks] int32; past a sequence's blocks anything, which is not read.
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

    @classmethod
    def of_texts(cls, texts: list[list[int]], block_size: int) -> "Batch":
        """Whole texts of token ids in one step, the first at the cache's first block, without logits."""
        lengths = torch.tensor([len(text) for text in texts], dtype=torch.int32)
        counts = [-(-len(text) // block_size) for text in texts]
        table = torch.zeros(len(texts), max(counts), dtype=torch.int32)
        slots, first = [], 0
        for row, (text, count) in enumerate(zip(texts, counts, strict=True)):
            table[row, :count] = torch.arange(first, first + count)
            slots.append(torch.arange(len(text)) + first * block_size)
            first += count
        return cls(
            token_ids=torch.tensor([token for text in texts for token in text]),
            positions=torch.cat([torch.arange(len(text)) for text in texts]),
            query_start=torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).int()]),
            seq_lens=lengths,
            block_table=table,
            slot_mapping=torch.cat(slots),
            logits_indices=torch.arange(0),
        )
