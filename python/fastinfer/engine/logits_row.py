"""Rows of logits: the sequence that each row belongs to, and the drafts that precede its token."""

from typing import NamedTuple

from fastinfer.engine.chunk import Chunk
from fastinfer.engine.grammar import Grammar
from fastinfer.engine.sequence import Sequence
from fastinfer.sampling_params import LogitsProcessor


class LogitsRow(NamedTuple):
    """A row of logits, from which one token is drawn.

    The first row of a sequence has no drafts; each of its following rows has one draft more than the row before.

    Attributes:
        sequence: the sequence that the token is drawn for.
        drafts: draft tokens between the sequence's last token and the token to draw.
        grammar: grammar that the token must match; ``None`` for any token.
        processors: the user's functions that change the logits, in the order in which they are called.
        is_early: whether the token must not end the text, because that has fewer than ``min_tokens`` tokens. It is
            known when the step is launched; later the sequence counts the token that is drawn, too.
    """

    sequence: Sequence
    drafts: list[int]
    grammar: Grammar | None = None
    processors: tuple[LogitsProcessor, ...] = ()
    is_early: bool = False

    @classmethod
    def of(
        cls,
        sequence: Sequence,
        drafts: list[int],
        grammar: Grammar | None = None,
        processors: tuple[LogitsProcessor, ...] = (),
    ) -> "LogitsRow":
        """Describe a row of a step that is not launched yet."""
        minimum = sequence.params.min_tokens
        is_early = minimum > 0 and sequence.num_tokens - sequence.num_prompt_tokens + len(drafts) < minimum
        return cls(sequence, drafts, grammar, processors, is_early)


def drop_impossible_drafts(chunk: Chunk) -> None:
    """Drop a chunk's drafts from the first impossible one on.

    A draft is impossible if the grammar does not allow it, or if the grammar leaves no choice after it: forced tokens
    are appended without a draw, so the draft's own row of logits would be of no use. While forced tokens are drawn,
    for their log-probabilities, no draft is verified.
    """
    grammar = chunk.sequence.grammar
    if grammar is not None and chunk.num_receivers:
        possible = 0 if chunk.sequence.forced else _num_possible(chunk.drafts, grammar)
        chunk.drafts = chunk.drafts[:possible]


def logits_rows(chunk: Chunk) -> list[LogitsRow]:
    """Return the rows of logits that a chunk needs: one per sequence that continues from it, then one per draft."""
    sequence = chunk.sequence
    if not chunk.num_receivers:
        return []
    processors = tuple(sequence.params.logits_processors or ())  # siblings have the same parameters
    rows = [LogitsRow.of(sequence, [], sequence.grammar, processors)]
    if sequence.siblings:
        rows += [LogitsRow.of(sibling, [], sibling.grammar, processors) for sibling in sequence.siblings]
    if chunk.drafts:
        drafts = [chunk.drafts[: count + 1] for count in range(len(chunk.drafts))]
        rows += [LogitsRow.of(sequence, own, sequence.grammar, processors) for own in drafts]
    return rows


def _num_possible(drafts: list[int], grammar: Grammar) -> int:
    """Return the number of drafts before the first impossible one; the grammar's state is the same afterwards."""
    num_valid = grammar.validate(drafts) if drafts else 0
    for index, draft in enumerate(drafts[:num_valid]):
        grammar.accept(draft)
        if grammar.finished or grammar.forced_tokens():
            grammar.rollback(index + 1)
            return index
    grammar.rollback(num_valid)
    return num_valid
