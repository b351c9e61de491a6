"""Speculation with a head that drafts a block of tokens at once, see :mod:`fastinfer.models.dflash_head`."""

import time

from fastinfer.engine.chunk import Chunk
from fastinfer.engine.draft_model import DraftModelSpeculator, SequenceView
from fastinfer.engine.logits_row import LogitsRow
from fastinfer.engine.sampler import Sampler
from fastinfer.engine.sequence import Sequence
from fastinfer.engine.worker import Worker
from fastinfer.models.config import BlockConfig


class BlockToken(SequenceView):
    """A view of one token of a block, which is computed as a sequence of its own.

    Args:
        sequence: the sequence to draft for.
        position: position of the token.
        token: the token.
        samples: whether a draft is drawn at its place.
    """

    num_uncomputed_tokens = 1

    def __init__(self, sequence: Sequence, position: int, token: int, samples: bool) -> None:
        super().__init__(sequence, position, samples)
        self.token_ids = {position: token}


class BlockChunk(Chunk):
    """A token of a block, which sees the text and the block up to ``end``."""

    __slots__ = ("_end",)

    def __init__(self, token: BlockToken, end: int) -> None:
        super().__init__(token, 1)  # type: ignore[arg-type]
        self._end = end

    @property
    def num_seen(self) -> int:
        return self._end - 1  # beside the token itself


class BlockSpeculator(DraftModelSpeculator):
    """Drafts all tokens of a block in one call of the head.

    The keys and values of the text are stored in the model's own steps, so the head has nothing to make up for. A draft
    is drawn without the drafts before it: with penalties or a grammar fewer of them are right. Nothing is drafted where
    the model computes several tokens at once, as after those that a grammar forces: it has no states of them yet.

    Args:
        worker, sampler, max_drafts, max_tokens: see :class:`DraftModelSpeculator`.
        block: what the head was trained for; a sequence gets no more drafts at a time.
    """

    def __init__(self, worker: Worker, sampler: Sampler, max_drafts: int, max_tokens: int, block: BlockConfig) -> None:
        super().__init__(worker, sampler, min(max_drafts, block.size - 1), max_tokens)
        self._mask, self._is_causal = block.mask_token, block.is_causal

    def draft_seconds(self, count: int) -> float:
        return self._median_seconds() if count else 0.0

    def propose(self, chunks: list[Chunk]) -> None:
        drafting = [chunk for chunk in chunks if chunk.num_drafts and chunk.num_tokens == 1]
        if not drafting:
            return
        start = time.perf_counter()
        parts: list[Chunk] = []
        rows: list[LogitsRow] = []
        for chunk in drafting:
            sequence, count = chunk.sequence, chunk.num_drafts
            first = sequence.num_computed_tokens
            for i, token in enumerate([sequence.token_ids[first], *[self._mask] * count]):
                end = first + (i if self._is_causal else count) + 1
                parts.append(BlockChunk(BlockToken(sequence, first + i, token, i > 0), end))
            rows += [LogitsRow.of(sequence, [self._mask] * i) for i in range(count)]
        drawn = iter(self._sample(self._worker.run(parts, rows), rows))
        for chunk in drafting:
            own = [next(drawn).token_id for _ in range(chunk.num_drafts)]
            chunk.drafts = own[: next((i for i, token in enumerate(own) if token < 0), len(own))]
        self._seconds.append(time.perf_counter() - start)

    def _num_lacking(self, chunk: Chunk, num_accepted: int) -> int:
        return 0
