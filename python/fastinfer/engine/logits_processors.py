"""The user's functions that change the logits of a request."""

from collections.abc import Sequence
from typing import overload

import torch
from torch import Tensor

from fastinfer.engine.logits_row import LogitsRow
from fastinfer.errors import RequestError


class OutputTokens(Sequence[int]):
    """The tokens that precede a row of logits, without the prompt; read-only, and made without copying them.

    Args:
        row: the row.
    """

    def __init__(self, row: LogitsRow) -> None:
        self._token_ids = row.sequence.token_ids
        self._start = row.sequence.num_prompt_tokens
        self._border = len(self._token_ids) - self._start
        self._drafts = row.drafts

    def __len__(self) -> int:
        return self._border + len(self._drafts)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        position = range(len(self))[index]
        return (
            self._token_ids[self._start + position]
            if position < self._border
            else self._drafts[position - self._border]
        )


def process_logits(logits: Tensor, rows: list[LogitsRow]) -> tuple[Tensor, dict[int, Exception]]:
    """Call the processors of each row.

    Args:
        logits: [rows, vocab] logits of the model, which are not changed.
        rows: description of each row.

    Returns:
        The changed logits, [rows, vocab] fp32, or ``logits`` itself if no row has processors; and the errors of
        processors, by row.
    """
    if not any(row.processors for row in rows):
        return logits, {}
    errors: dict[int, Exception] = {}
    changed = logits.to(torch.float32, copy=True)
    for index, row in enumerate(rows):
        output = OutputTokens(row)
        for processor in row.processors:
            try:
                returned = processor(output, changed[index])
                if returned is not None:
                    changed[index] = _checked(returned, changed[index])
            except Exception as error:  # any error ends this request alone
                errors[index] = error.with_traceback(None)
                changed[index] = logits[index]  # a token must be drawn all the same
                break
    return changed, errors


def _checked(returned: Tensor, row: Tensor) -> Tensor:
    if not isinstance(returned, Tensor) or returned.shape != row.shape or not returned.is_floating_point():
        got = f"{returned.dtype} {list(returned.shape)}" if isinstance(returned, Tensor) else type(returned).__name__
        raise RequestError(f"a logits processor must return a float tensor {list(row.shape)} or None, got {got}")
    return returned
