"""Penalties of a draw and the token counts that they need, as tensors that stay in place from draw to draw."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastinfer.engine.logits_row import LogitsRow
from fastinfer.engine.sequence import Sequence
from fastinfer.engine.transfer import to_device


class _Counted(NamedTuple):
    """Content of a row of counts: the first generated tokens of a sequence, then drafts."""

    sequence: Sequence
    num_output_tokens: int
    drafts: list[int]


class PenaltyTensors:
    """Keeps the counts of each row, and writes only what has changed since the last draw.

    A row that belongs to the same sequence as in the last draw gets the few tokens by which the sequence has grown.
    Only a row with another sequence is written as a whole.

    Args:
        vocab_size: number of columns of the logits.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._output = torch.zeros(0, 0, dtype=torch.int32)
        self._prompt = torch.zeros(0, 0, dtype=torch.int32)
        self._rows: list[_Counted | None] = []  # None if the content is unknown

    def update(self, rows: list[LogitsRow], device: torch.device) -> dict[str, Tensor]:
        """Return the arguments of ``ops.sample`` for a draw, valid until the next one; empty without penalties."""
        if all(row.sequence.counts is None for row in rows):
            return {}
        self._reserve(len(rows), device)
        penalties = np.tile(np.array([1, 0, 0], np.float32), (len(rows), 1))
        counted: dict[int, _Counted] = {}
        changes: list[tuple[int, int, int]] = []  # row, token, number to add
        for index, row in enumerate(rows):
            sequence, drafts = row.sequence, row.drafts
            if sequence.counts is None:
                continue  # penalties of 1, 0 and 0 ignore the counts
            p = sequence.params
            penalties[index] = p.repetition_penalty, p.presence_penalty, p.frequency_penalty
            known, self._rows[index] = self._rows[index], None  # unknown until all is written
            if known is None or known.sequence is not sequence:
                self._output[index] = to_device(sequence.counts.output, device)
                self._prompt[index] = to_device(sequence.counts.prompt, device)
                known = _Counted(sequence, sequence.num_output_tokens, [])
            new = sequence.token_ids[sequence.num_prompt_tokens + known.num_output_tokens :]
            changes += [(index, token, -1) for token in known.drafts]
            changes += [(index, token, 1) for token in (*new, *drafts)]
            counted[index] = _Counted(sequence, sequence.num_output_tokens, drafts)
        self._add(changes, device)
        for index, content in counted.items():
            self._rows[index] = content
        used = slice(len(rows))
        return {
            "penalties": to_device(penalties, device),
            "output_counts": self._output[used],
            "prompt_mask": self._prompt[used],
        }

    def _reserve(self, num_rows: int, device: torch.device) -> None:
        """Make room for as many rows; all of them are then unknown."""
        if num_rows > len(self._rows) or device != self._output.device:
            num_rows = max(num_rows, 2 * len(self._rows))
            words = -(-self._vocab_size // 32)
            self._output = torch.zeros(num_rows, self._vocab_size, dtype=torch.int32, device=device)
            self._prompt = torch.zeros(num_rows, words, dtype=torch.int32, device=device)
            self._rows = [None] * num_rows

    def _add(self, changes: list[tuple[int, int, int]], device: torch.device) -> None:
        """Add numbers to single counts, in one call for all."""
        if changes:
            rows, tokens, numbers = np.array(changes, np.int64).T
            places = to_device(rows.copy(), device), to_device(tokens.copy(), device)
            self._output.index_put_(places, to_device(numbers.astype(np.int32), device), accumulate=True)
