"""Speculation with a draft model: a smaller model drafts tokens.

The draft model has a KV cache of its own, which uses the same block numbers as the model's.
"""

import statistics
import time
from collections import deque
from dataclasses import replace
from typing import overload

import torch
from torch import Tensor

from fastinfer.engine.acceptance import FIRST_ACCEPTANCE, Acceptance
from fastinfer.engine.batch_inputs import StepResult
from fastinfer.engine.block_table import BlockTable
from fastinfer.engine.chunk import Chunk
from fastinfer.engine.logits_row import LogitsRow
from fastinfer.engine.sampled_token import SampledToken
from fastinfer.engine.sampler import Sampler
from fastinfer.engine.sequence import Sequence
from fastinfer.engine.speculation import Speculator
from fastinfer.engine.worker import Worker
from fastinfer.models.draft_chain import MISSING

# The acceptance rate of a sequence without drafts is not updated. It is therefore reset every RETRY_STEPS steps, so
# that the sequence gets drafts again.
RETRY_STEPS = 64


class SequenceView:
    """A stand-in for a :class:`Sequence` in the draft model's steps.

    It has no images: the draft model sees the tokens in their places as text, which makes drafts worse but not the
    text.

    Args:
        sequence: the sequence to draft for.
        num_computed_tokens: number of tokens that the draft model has computed.
        samples: whether to draw a draft once all tokens are computed.
    """

    adapter = -1
    images = layout = pooling = None
    scores_prompt = False
    num_slots = 1
    num_restarts = num_unknown_tokens = 0

    def __init__(self, sequence: Sequence, num_computed_tokens: int, samples: bool) -> None:
        self.sequence = sequence
        self.num_computed_tokens = num_computed_tokens
        self.samples = samples

    @property
    def block_tables(self) -> list[BlockTable]:
        return self.sequence.block_tables

    @property
    def num_prompt_tokens(self) -> int:
        return self.sequence.num_prompt_tokens

    @property
    def is_decoding(self) -> bool:
        return self.sequence.is_decoding


class DraftView(SequenceView):
    """A view of a sequence with its drafts.

    Its tokens include the drafts so far, and its computed tokens are those that the draft model has computed.

    Attributes:
        drafts: tokens that have been drafted so far.
    """

    def __init__(self, sequence: Sequence, num_computed_tokens: int, samples: bool) -> None:
        super().__init__(sequence, num_computed_tokens, samples)
        self.drafts: list[int] = []

    @property
    def token_ids(self) -> "_Joined":
        return _Joined(self.sequence.token_ids, self.drafts)

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.sequence) + len(self.drafts) - self.num_computed_tokens


class _Joined:
    """Two lists read as one, without a copy of the first, which may be long."""

    def __init__(self, first: list[int], second: list[int]) -> None:
        self._first = first
        self._second = second

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        border = len(self._first)
        if isinstance(index, int):
            return self._first[index] if index < border else self._second[index - border]
        start, stop = index.start, index.stop
        return self._first[start:stop] + self._second[max(start - border, 0) : max(stop - border, 0)]


class DraftModelSpeculator(Speculator):
    """Drafts tokens with a smaller model of the same vocabulary, or of a part of it.

    Each draft is drawn with the same noise as the draw that will verify it. Both draws give the same token with a
    probability of at least (1 - TV) / (1 + TV), where TV is the total variation distance of the two models'
    distributions.

    Drafts decide no text, so it does not matter which tokens the draft model computes as those of a prompt (see
    :mod:`fastinfer.engine.roles`): a chunk that makes up for skipped ones may have both.

    Every prompt is computed by both models. The draft model skips generated tokens while drafts do not pay off for a
    sequence (``Sequence.draft_gap``), and computes them when it next drafts for this sequence.

    Args:
        worker: worker of the draft model.
        sampler: sampler for the drafts; not the engine's own, as a sampler keeps the parameters of its last draw.
        max_drafts: maximum number of drafts per sequence and step.
        max_tokens: maximum number of tokens in one call of the worker.
    """

    def __init__(self, worker: Worker, sampler: Sampler, max_drafts: int, max_tokens: int) -> None:
        super().__init__(max_drafts)
        self._worker = worker
        self._sampler = sampler
        self._max_tokens = max_tokens
        self._seconds: deque[float] = deque(maxlen=8)
        self._num_steps = 0
        tokens = worker.model.draft_tokens
        self._tokens = [] if tokens is None else tokens.tolist()

    def prepare_drafts(self, sequence: Sequence) -> int:
        return self._max_drafts

    def draft_seconds(self, count: int) -> float:
        return count * self._median_seconds()

    def _median_seconds(self) -> float:
        """Return the time of a call that drafts; 0 until it was measured."""
        return statistics.median(self._seconds) if len(self._seconds) > 2 else 0.0

    def choose_num_drafts(self, sequences: list[Sequence]) -> None:
        super().choose_num_drafts(sequences)
        self._num_steps += 1
        idle = [] if self._num_steps % RETRY_STEPS else [s for s in sequences if s.is_decoding and not s.num_drafts]
        for sequence in idle:
            sequence.acceptance = Acceptance(FIRST_ACCEPTANCE)

    def propose(self, chunks: list[Chunk]) -> None:
        views = self._catch_up(chunks)
        while views:
            start = time.perf_counter()
            self._draw([(view, 1) for _, view in views])
            self._seconds.append(time.perf_counter() - start)
            views = [(chunk, view) for chunk, view in views if view.samples and len(view.drafts) < chunk.num_drafts]

    def record_accepted(self, chunk: Chunk, num_accepted: int) -> None:
        super().record_accepted(chunk, num_accepted)
        chunk.sequence.draft_gap += self._num_lacking(chunk, num_accepted)

    def _num_lacking(self, chunk: Chunk, num_accepted: int) -> int:
        """Return the number of a chunk's accepted drafts that the draft model has not computed."""
        # It has not computed the last draft itself, only drawn it.
        return max(num_accepted - max(len(chunk.drafts) - 1, 0), 0)

    def _catches_up_on(self, chunk: Chunk) -> bool:
        """Return whether to compute what the draft model lacks of a sequence before the model computes the chunk."""
        return chunk.num_drafts > 0 or not chunk.sequence.is_decoding

    def _catch_up(self, chunks: list[Chunk]) -> list[tuple[Chunk, DraftView]]:
        """Compute the tokens that the draft model lacks, this step's included, and draw the first drafts.

        Returns:
            The chunks that need more drafts, with their sequences' views.
        """
        room = self._max_tokens
        pairs: list[tuple[Chunk, DraftView, int]] = []
        for chunk in chunks:
            sequence = chunk.sequence
            missing = sequence.draft_gap + chunk.num_tokens
            count = min(missing, room) if self._catches_up_on(chunk) else 0
            view = DraftView(sequence, sequence.num_computed_tokens - sequence.draft_gap, chunk.num_drafts > 0)
            pairs.append((chunk, view, count))
            room -= count
        self._draw([(view, count) for _, view, count in pairs if count])
        unfinished = []
        for chunk, view, count in pairs:
            chunk.sequence.draft_gap += chunk.num_tokens - count
            chunk.drafts = view.drafts
            if view.samples and 0 < len(view.drafts) < chunk.num_drafts:
                unfinished.append((chunk, view))
        return unfinished

    def _draw(self, parts: list[tuple[DraftView, int]]) -> None:
        """Compute the given number of tokens of each view, and draw a draft for each view that needs one.

        A view needs a draft if all its tokens are computed then and it ``samples``.
        """
        if not parts:
            return
        chunks = [Chunk(view, count) for view, count in parts]  # type: ignore[arg-type]
        drawing = [view for chunk, (view, _) in zip(chunks, parts, strict=True) if chunk.is_last and view.samples]
        rows = [LogitsRow.of(view.sequence, view.drafts) for view in drawing]
        result = self._worker.run(chunks, rows)
        drawn = self._sample(result, rows)
        for view, count in parts:
            view.num_computed_tokens += count
        for view, token in zip(drawing, drawn, strict=True):
            view.samples = token.token_id >= 0
            if view.samples:
                view.drafts.append(token.token_id)

    def _sample(self, result: StepResult, rows: list[LogitsRow]) -> list[SampledToken]:
        """Draw a token of the whole vocabulary for each row."""
        model = self._worker.model
        if model.draft_tokens is None:
            return self._sampler.draw(result, rows)
        if result.sampling.needs_only_tokens and result.sampling.is_free and all(map(_is_greedy, rows)):
            drawn = self._sampler.draw(result, rows)
            return [self._token_of(column) for column in drawn]
        # Noise, masks and penalties are those of tokens, not of columns.
        logits = spread(result.logits, model.draft_tokens, model.config.vocab_size)
        return self._sampler.draw(replace(result, logits=logits, draws=None, tokens=None), rows)

    def _token_of(self, column: SampledToken) -> SampledToken:
        """Return the token of a drawn column of a reduced vocabulary; an error stays one."""
        return column if column.token_id < 0 else SampledToken(self._tokens[column.token_id])


def _is_greedy(row: LogitsRow) -> bool:
    return row.sequence.params.temperature == 0.0


def spread(logits: Tensor, tokens: Tensor, vocab_size: int) -> Tensor:
    """Spread the logits of a reduced vocabulary over the whole one.

    Args:
        logits: [rows, draft_vocab].
        tokens: [draft_vocab] int64; the token of each column, all different.
        vocab_size: number of tokens of the whole vocabulary.

    Returns:
        [rows, vocab_size] fp32; tokens without a column have the logit ``MISSING``.
    """
    whole = torch.full((len(logits), vocab_size), MISSING, dtype=torch.float32, device=logits.device)
    return whole.index_copy_(1, tokens, logits.float())
