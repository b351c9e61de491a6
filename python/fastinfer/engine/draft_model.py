"""Guesses by a smaller model, which keeps its keys and values in the same blocks, in tensors of its own."""

import statistics
import time
from collections import deque

from fastinfer.engine.acceptance import FIRST_ACCEPTANCE, Acceptance
from fastinfer.engine.logits_row import LogitsRow
from fastinfer.engine.runner import Runner
from fastinfer.engine.sampler import Sampler
from fastinfer.engine.scheduler import Chunk
from fastinfer.engine.sequence import Sequence
from fastinfer.engine.speculation import Speculator

# Sequences whose drafts do not pay are tried again every so many steps: only what is drafted can be learned from.
RETRY_STEPS = 64


class _View:
    """A sequence as the draft model sees it, in place of a :class:`Sequence`: the drafts so far are part of its text,
    and computed is what the draft model has computed.
    """

    adapter = -1
    num_slots = 1

    def __init__(self, sequence: Sequence, num_computed_tokens: int, wants_draft: bool) -> None:
        self.sequence = sequence
        self.num_computed_tokens = num_computed_tokens
        self.samples = wants_draft
        self.drafts: list[int] = []

    @property
    def blocks(self) -> list[int]:
        return self.sequence.blocks

    @property
    def token_ids(self) -> list[int]:
        return self.sequence.token_ids + self.drafts if self.drafts else self.sequence.token_ids

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.sequence) + len(self.drafts) - self.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        return self.sequence.is_decoding


class DraftModelSpeculator(Speculator):
    """Draws drafts from a smaller model of the same vocabulary, each with the random number of the draw that will
    verify it: where the two models agree on the distribution they agree on the token.

    Every prompt goes through both models. Of generated tokens the draft model may miss the newest, when it did not pay
    to ask it (``Sequence.draft_gap``); it computes them when it is asked again.

    Args:
        runner: of the draft model.
        sampler: of its own: it holds the parameters of its latest draw.
        max_drafts: per sequence and step.
        max_tokens: that the runner takes at a time.
    """

    def __init__(self, runner: Runner, sampler: Sampler, max_drafts: int, max_tokens: int) -> None:
        super().__init__(max_drafts)
        self._runner = runner
        self._sampler = sampler
        self._max_tokens = max_tokens
        self._seconds: deque[float] = deque(maxlen=8)
        self._num_steps = 0

    def num_available(self, sequence: Sequence) -> int:
        return self._max_drafts

    def draft_seconds(self) -> float:
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
        # The last draft was drawn, but nothing was computed from it.
        chunk.sequence.draft_gap = chunk.draft_gap + max(num_accepted - max(len(chunk.drafts) - 1, 0), 0)

    def _catch_up(self, chunks: list[Chunk]) -> list[tuple[Chunk, _View]]:
        """Compute what the large model has computed or will compute in this step, and the first drafts; returns the
        sequences that want more.
        """
        room = self._max_tokens
        pairs: list[tuple[Chunk, _View, int]] = []
        for chunk in chunks:
            sequence = chunk.sequence
            missing = sequence.draft_gap + chunk.num_tokens
            count = min(missing, room) if chunk.num_drafts or not sequence.is_decoding else 0
            view = _View(sequence, sequence.num_computed_tokens - sequence.draft_gap, chunk.num_drafts > 0)
            pairs.append((chunk, view, count))
            room -= count
        self._draw([(view, count) for _, view, count in pairs if count])
        wanting = []
        for chunk, view, count in pairs:
            chunk.draft_gap = chunk.sequence.draft_gap + chunk.num_tokens - count
            chunk.drafts = view.drafts
            if view.samples and 0 < len(view.drafts) < chunk.num_drafts:
                wanting.append((chunk, view))
        return wanting

    def _draw(self, parts: list[tuple[_View, int]]) -> None:
        """Compute so many tokens of each, and draw a draft for those that reach the end of their text and want one."""
        if not parts:
            return
        chunks = [Chunk(view, count) for view, count in parts]  # type: ignore[arg-type]
        drawing = [view for chunk, (view, _) in zip(chunks, parts, strict=True) if chunk.is_last and view.samples]
        result = self._runner(chunks)
        rows = [LogitsRow(view.sequence, view.drafts) for view in drawing]
        drawn = self._sampler.draw(result.logits, rows, result.recorded)
        for view, count in parts:
            view.num_computed_tokens += count
        for view, token in zip(drawing, drawn, strict=True):
            view.samples = token.token_id >= 0
            if view.samples:
                view.drafts.append(token.token_id)
