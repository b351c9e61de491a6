"""Bit masks of the tokens that grammars, ``min_tokens`` and a request's rules allow."""

import numpy as np

from fastinfer.engine.logits_row import LogitsRow
from fastinfer.engine.token_rules import allow, forbid


class TokenMasks:
    """Computes a bit mask for each row of logits, always in the same memory.

    Args:
        max_rows: maximum number of rows in a draw.
        vocab_size: number of columns of the logits.
        eos_ids: end-of-sequence tokens. Like the request's own stop tokens, they are forbidden until the text has
            ``min_tokens`` tokens.
    """

    def __init__(self, max_rows: int, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self._eos_ids = eos_ids
        self._words = np.zeros((max_rows, -(-vocab_size // 32)), np.int32)

    def compute(self, rows: list[LogitsRow]) -> tuple[np.ndarray | None, dict[int, Exception]]:
        """Compute the masks of a draw.

        Returns:
            The masks, [rows, ceil(vocab / 32)] int32, where bit t % 32 of word t // 32 is set if token t is allowed, or
            ``None`` if all tokens are allowed in all rows; and the errors of grammars that failed, by row.
        """
        if all(not row.is_early and row.grammar is None and row.sequence.token_rules is None for row in rows):
            return None, {}
        errors: dict[int, Exception] = {}
        masks = self._words[: len(rows)]
        num_followed = 0  # drafts that the current grammar has accepted, to be rolled back
        for index, row in enumerate(rows):
            masks[index] = -1
            if row.grammar is not None:
                try:
                    if row.drafts:
                        row.grammar.accept(row.drafts[-1])
                        num_followed += 1
                    if row.sequence.forced:
                        masks[index] = 0
                        allow(masks[index], row.sequence.forced[0])
                    else:
                        row.grammar.fill_mask(masks[index])
                except Exception as error:  # any error ends this request alone
                    errors[index] = error.with_traceback(None)
                    masks[index] = -1
                if num_followed and (row is rows[-1] or not rows[index + 1].drafts):
                    num_followed, count = 0, num_followed
                    try:
                        row.grammar.rollback(count)
                    except Exception as error:  # a grammar that has failed once fails again
                        errors[index] = error.with_traceback(None)
            if (rules := row.sequence.token_rules) is not None and not row.sequence.forced:
                rules.apply(masks[index], row.sequence.token_ids, row.sequence.num_prompt_tokens, row.drafts)
            if row.is_early:
                self._forbid_ends(row, masks[index])
        return masks, errors

    def _forbid_ends(self, row: LogitsRow, mask: np.ndarray) -> None:
        """Clear the bits of the tokens that would end the row's text."""
        for token_id in self._eos_ids.union(row.sequence.params.stop_token_ids or ()):
            forbid(mask, token_id)
