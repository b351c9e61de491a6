"""Speculation with a draft head, see :mod:`fastinfer.models.draft_head`."""

from fastinfer.engine.chunk import Chunk
from fastinfer.engine.draft_model import DraftModelSpeculator, DraftView


class HeadSpeculator(DraftModelSpeculator):
    """Drafts tokens with a head that reads the model's hidden states.

    The head computes a token from the features of the token before, so it computes a prompt's chunk after the model,
    and the newest token of a sequence before. Drafts after the first are computed from the head's own output. Once the
    model has computed their features, those that were accepted are computed again with the next token.
    """

    def follow(self, chunks: list[Chunk]) -> None:
        """Compute the tokens of prompts, whose features the model has just computed."""
        room, parts = self._max_tokens, []
        for chunk in chunks:
            sequence = chunk.sequence
            if sequence.is_decoding:
                continue
            end = sequence.num_computed_tokens + chunk.num_tokens
            view = DraftView(sequence, end - sequence.draft_gap, samples=False)
            count = min(sequence.draft_gap, room)
            parts.append((view, count))
            sequence.draft_gap -= count
            room -= count
        self._draw([(view, count) for view, count in parts if count])

    def _num_lacking(self, chunk: Chunk, num_accepted: int) -> int:
        return num_accepted

    def _catches_up_on(self, chunk: Chunk) -> bool:
        return chunk.num_drafts > 0
