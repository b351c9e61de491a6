"""Input tensors of one step."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fastinfer.models.image_tokens import ImageTokens
from fastinfer.models.sparse_attention import SparseRows


@dataclass(frozen=True, slots=True)
class LastRows:
    """The last rows of each sequence of a batch, for which the layers that store nothing are computed.

    The hidden states of the other rows are not wanted: those layers would compute them for nobody.

    Attributes:
        rows: [n] int64; their indices in the batch, in ascending order.
        positions: [n] int64; their positions.
        query_start: [seqs + 1] int32; cumulative counts of the sequences, from 0 to ``n``.
        adapter_ids: [n] int32; their LoRA adapters, -1 for none; ``None`` if no token has an adapter.
        first_prompt_row: index of the first of them from which on all are tokens of prompts, see
            :func:`fastinfer.ops.prompt_rows`.
    """

    rows: Tensor
    positions: Tensor
    query_start: Tensor
    adapter_ids: Tensor | None
    first_prompt_row: int


@dataclass(frozen=True, slots=True)
class FeatureSlots:
    """The places of features in the cache of a draft head, see :mod:`fastinfer.models.draft_head`.

    Attributes:
        reads: [tokens] int64; slot of the token before each token, whose features the head reads; the first token of a
            sequence has its own.
        writes: [tokens] int64; slot in which a token's output is stored as its features, -1 for none.
        first_layer: first layer of the head that is computed: that of the draft.
    """

    reads: Tensor
    writes: Tensor
    first_layer: int = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """Tokens of one step, flattened without padding, and the places of their keys and values in the cache.

    Attributes:
        token_ids: [tokens] int64.
        positions: [tokens] int64; position of each token in its sequence, from 0, by which it is rotated. After an
            image it may be smaller than the number of tokens before, see :mod:`fastinfer.models.image_tokens`.
        query_start: [seqs + 1] int32; cumulative token counts of the sequences, from 0 to ``tokens``.
        seq_lens: [seqs] int32; cached length of each sequence, including this step's tokens.
        block_tables: for each group of layers, [seqs, max_blocks] int32; blocks of each sequence. Entries past them are
            never read.
        slot_mappings: for each group of layers, [tokens] int64; ``block * block_size + offset`` of each token.
        logits_indices: [n] int64; indices of the tokens whose logits are computed, among the rows of hidden states.
        adapter_ids: [tokens] int32; LoRA adapter of each token, -1 for none; ``None`` if no token has an adapter.
        logits_adapter_ids: [n] int32; LoRA adapters of the tokens whose logits are computed, likewise.
        state_reads: [seqs] int32; slot with the states of each sequence before its first token, -1 for states of zeros.
            ``None`` for models without linear attention.
        state_writes: [tokens] int32; slot in which the states after each token are stored, -1 for none; likewise. Only
            the sequence that reads a slot may write to it in the same step.
        images: the tokens of images; ``None`` if there are none.
        sparse: the tokens that attend to a part of the cache; ``None`` if all attend to everything.
        hidden: [tokens, hidden] hidden states before the model's first layer, if that is not the first of the whole
            model, see :mod:`fastinfer.parallel.stage`; ``None`` otherwise.
        last: the rows whose hidden states are wanted, if the model's last layers store nothing; ``None`` for all.
        features: the places of features, of a draft head's batch; ``None`` for other models.
        window_lens: [seqs] int32; ``seq_lens`` for layers with a window; ``None`` if they are the same.
        block_places: [tokens] int32; place of each token in its block, from 0, of a draft head that convolves blocks;
            ``None`` for other models.
        row_start: [tokens + 1] int32; 0, 1, 2, ..., the ``query_start`` where each token is a sequence of its own.
            ``None`` only for models without indexers, see :mod:`fastinfer.models.indexer`.
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
    state_reads: Tensor | None = None
    state_writes: Tensor | None = None
    images: ImageTokens | None = None
    sparse: SparseRows | None = None
    hidden: Tensor | None = None
    last: LastRows | None = None
    features: FeatureSlots | None = None
    window_lens: Tensor | None = None
    block_places: Tensor | None = None
    row_start: Tensor | None = None

    def lens(self, window: int) -> Tensor:
        """Return ``seq_lens`` for a layer with a window of this length, 0 for none."""
        return self.window_lens if window and self.window_lens is not None else self.seq_lens

    def rotation(self, cos_sin_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Return the positions and the rotary table by which the batch is rotated, given the model's table."""
        if self.images is None:
            return self.positions, cos_sin_cache
        return self.images.rotation(self.positions, cos_sin_cache)

    def of_last_rows(self) -> "Batch":
        """Return the batch of the last rows, for layers that store nothing."""
        last, sparse = self.last, self.sparse
        assert last is not None
        return replace(
            self,
            positions=last.positions,
            query_start=last.query_start,
            adapter_ids=last.adapter_ids,
            sparse=None if sparse is None else sparse.of_last_rows(len(last.rows), last.first_prompt_row),
            last=None,
            row_start=None if self.row_start is None else self.row_start[: len(last.rows) + 1],
        )

    @classmethod
    def of_texts(cls, texts: list[list[int]], block_size: int) -> "Batch":
        """Make a batch of whole texts of token ids, without logits.

        Their blocks start at the cache's first block, and their last states are not stored.
        """
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
            state_reads=torch.full((len(texts),), -1, dtype=torch.int32),
            state_writes=torch.full((int(lengths.sum()),), -1, dtype=torch.int32),
            row_start=torch.arange(int(lengths.sum()) + 1, dtype=torch.int32),
        )
