"""Rows of logits: which sequence each one is for, and which drafts stand before it."""

from typing import NamedTuple

from fastinfer.engine.batch_inputs import num_logits_rows
from fastinfer.engine.grammar import Grammar
from fastinfer.engine.scheduler import Chunk
from fastinfer.engine.sequence import Sequence


class LogitsRow(NamedTuple):
    """A row of logits, from which one token is drawn.

    A sequence's rows with drafts follow its row without, each with one draft more.

    Attributes:
        sequence: gets the token.
        drafts: draft tokens between the sequence's last token and the drawn one.
        grammar: what the token must obey.
    """

    sequence: Sequence
    drafts: list[int]
    grammar: Grammar | None = None


def drop_impossible_drafts(chunk: Chunk) -> None:
    """Drop a chunk's drafts from the first one on that its grammar rules out.

    A grammar rules out a draft that it does not allow, and one after which it leaves no choice: tokens that it forces
    are appended without a draw.
    """
    grammar = chunk.sequence.grammar
    if grammar is not None and num_logits_rows(chunk):
        chunk.drafts = chunk.drafts[: _num_possible(chunk.drafts, grammar)]


def logits_rows(chunk: Chunk) -> list[LogitsRow]:
    """The rows of logits that a chunk asks for: one per sequence that continues from it, then one per draft."""
    if not num_logits_rows(chunk):
        return []
    sequence = chunk.sequence
    rows = [LogitsRow(owner, [], owner.grammar) for owner in (sequence, *sequence.siblings)]
    drafted = (chunk.drafts[: count + 1] for count in range(len(chunk.drafts)))
    return rows + [LogitsRow(sequence, drafts, sequence.grammar) for drafts in drafted]


def _num_possible(drafts: list[int], grammar: Grammar) -> int:
    num_valid = grammar.validate(drafts) if drafts else 0
    for index, draft in enumerate(drafts[:num_valid]):
        grammar.accept(draft)
        if grammar.finished or grammar.forced_tokens():
            grammar.rollback(index + 1)
            return index
    grammar.rollback(num_valid)
    return num_valid
