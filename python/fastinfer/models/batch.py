"""Input tensors of one step."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """Tokens of one step, flattened without padding, and the places of their keys and values in the cache.

    Attributes:
        token_ids: [tokens] int64.
        positions: [tokens] int64; position of each token in its sequence, from 0.
        query_start: [seqs + 1] int32; cumulative token counts of the sequences, from 0 to ``tokens``.
        seq_lens: [seqs] int32; cached length of each sequence, including this step's tokens.
        block_tables: for each group of layers, [seqs, max_blocks] int32; blocks of each sequence. Entries past them are
            never read.
        slot_mappings: for each group of layers, [tokens] int64; ``block * block_size + offset`` of each token.
        logits_indices: [n] int64; indices of the tokens whose logits are computed.
        adapter_ids: [tokens] int32; LoRA adapter of each token, -1 for none; ``None`` if no token has an adapter.
        logits_adapter_ids: [n] int32; LoRA adapters of the tokens whose logits are computed, likewise.
    """

    token_ids: Tensor
    positions: Tensor
    query_start: Tensor
    seq_lens: Tensor
    block_tables: tuple[Tensor, ...]
    slot_mappings: tuple[Tensor, ...]
    logits_indices: Tensor
    adapter_ids: Tensor | None = None
    logits_adapter_ids: Tensor | None = None

    @classmethod
    def of_texts(cls, texts: list[list[int]], block_size: int) -> "Batch":
        """Make a batch of whole texts of token ids, without logits; their blocks start at the cache's first block."""
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
            block_tables=(table,),
            slot_mappings=(torch.cat(slots),),
            logits_indices=torch.arange(0),
        )
