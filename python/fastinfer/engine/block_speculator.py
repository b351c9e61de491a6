"""Speculation with a head that drafts a block of tokens at once, see :mod:`fastinfer.models.dflash_head`."""

import time
from dataclasses import replace
from itertools import accumulate

import torch

from fastinfer.engine.batch_inputs import StepResult
from fastinfer.engine.chunk import Chunk
from fastinfer.engine.draft_model import DraftModelSpeculator, SequenceView
from fastinfer.engine.logits_row import LogitsRow
from fastinfer.engine.sampler import Sampler
from fastinfer.engine.sampling_inputs import SamplingInputs
from fastinfer.engine.sequence import Sequence
from fastinfer.engine.worker import Worker
from fastinfer.models.config import BlockConfig
from fastinfer.models.dflash_head import DFlashHead
from fastinfer.models.draft_chain import DraftChain


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

    __slots__ = ("_end", "_place")

    def __init__(self, token: BlockToken, end: int) -> None:
        super().__init__(token, 1)  # type: ignore[arg-type]
        self._end = end
        self._place = token.num_computed_tokens - token.sequence.num_computed_tokens

    @property
    def place(self) -> int:
        return self._place

    @property
    def num_seen(self) -> int:
        return self._end - 1  # beside the token itself


class BlockSpeculator(DraftModelSpeculator):
    """Drafts all tokens of a block in one call of the head.

    The keys and values of the text are stored in the model's own steps, so the head has nothing to make up for. A draft
    is drawn without the drafts before it, unless the head has a chain: with penalties or a grammar fewer of them are
    right. Nothing is drafted where the model computes several tokens at once, as after those that a grammar forces: it
    has no states of them yet.

    Args:
        worker, sampler, max_drafts, max_tokens: see :class:`DraftModelSpeculator`.
        block: what the head was trained for; a sequence gets no more drafts at a time.
    """

    def __init__(self, worker: Worker, sampler: Sampler, max_drafts: int, max_tokens: int, block: BlockConfig) -> None:
        super().__init__(worker, sampler, min(max_drafts, block.max_drafts), max_tokens)
        self._block = block

    def draft_seconds(self, count: int) -> float:
        return self._median_seconds() if count else 0.0

    def propose(self, chunks: list[Chunk]) -> None:
        drafting = [chunk for chunk in chunks if chunk.num_drafts and chunk.num_tokens == 1]
        if not drafting:
            return
        start = time.perf_counter()
        block = self._block
        parts: list[Chunk] = []
        rows: list[LogitsRow] = []
        for chunk in drafting:
            sequence, count = chunk.sequence, chunk.num_drafts
            first, num_masks = sequence.num_computed_tokens, count - block.drafts_next
            for i, token in enumerate([sequence.token_ids[first], *[block.mask_token] * num_masks]):
                end = first + (i if block.is_causal else num_masks) + 1
                parts.append(BlockChunk(BlockToken(sequence, first + i, token, block.drafts_next or i > 0), end))
            rows += [LogitsRow.of(sequence, [block.mask_token] * i) for i in range(count)]
        result = self._worker.run(parts, rows)
        head = self._worker.model  # another one after each sleep that drops the weights
        assert isinstance(head, DFlashHead)
        if head.chain is not None:
            self._draw_chains(result, drafting, head.chain)
        else:
            drawn = iter(self._sample(result, rows))
            for chunk in drafting:
                own = [next(drawn).token_id for _ in range(chunk.num_drafts)]
                chunk.drafts = own[: next((i for i, token in enumerate(own) if token < 0), len(own))]
        self._seconds.append(time.perf_counter() - start)

    def _draw_chains(self, result: StepResult, drafting: list[Chunk], chain: DraftChain) -> None:
        """Draw the drafts of all blocks place by place, each with the one before it."""
        device, sampling = result.logits.device, result.sampling
        assert isinstance(sampling, SamplingInputs)
        counts = [chunk.num_drafts for chunk in drafting]
        starts = list(accumulate(counts, initial=0))
        parameters = sampling.rows(starts[-1])
        # A block's drafts come from its first tokens, or from those after the newest one.
        skipped = 0 if self._block.drafts_next else 1
        tokens = [
            start + skipped * (block + 1) + i for block, start in enumerate(starts[:-1]) for i in range(counts[block])
        ]
        hidden = self._worker.model.normalize(result.hidden[torch.tensor(tokens, device=device)])
        newest = [chunk.sequence.token_ids[chunk.start] for chunk in drafting]
        drafts: list[list[int]] = [[] for _ in drafting]
        for place in range(max(counts)):
            live = [block for block, own in enumerate(drafts) if len(own) == place < counts[block]]
            if not live:
                break
            index = torch.tensor([starts[block] + place for block in live], device=device)
            before = torch.tensor([drafts[block][-1] if place else newest[block] for block in live], device=device)
            logits = chain(result.logits[index], hidden[index], before)
            part = replace(result, logits=logits, sampling=parameters.select(index), draws=None, tokens=None)
            rows = [LogitsRow.of(drafting[block].sequence, list(drafts[block])) for block in live]
            for block, drawn in zip(live, self._sample(part, rows), strict=True):
                if drawn.token_id >= 0:
                    drafts[block].append(drawn.token_id)
        for chunk, own in zip(drafting, drafts, strict=True):
            chunk.drafts = own

    def _num_lacking(self, chunk: Chunk, num_accepted: int) -> int:
        return 0
