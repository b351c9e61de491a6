"""Sampling parameters of a step's rows of logits, which are a part of the step's inputs."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from fastinfer.engine.logits_row import LogitsRow
from fastinfer.engine.sequence import Sequence
from fastinfer.engine.transfer import write_list


class SamplingInputs:
    """The parameters that every row of a draw has, at addresses that never change, so that graphs can read them.

    Args:
        longs: [2, max_rows] int64, host memory of the inputs.
        words: [4, max_rows] int32, likewise.
        view: function that returns the first elements of an array in this memory as a tensor on the device.

    Attributes:
        needs_only_tokens: whether no row needs log-probabilities, penalties or a bias.
        is_free: whether no row can have a mask or logits processors.
    """

    def __init__(self, longs: np.ndarray, words: np.ndarray, view: Callable[[np.ndarray, int], Tensor]) -> None:
        self.needs_only_tokens = self.is_free = False
        seeds, positions = longs
        top_k, *floats = words
        temperature, top_p, min_p = (array.view(np.float32) for array in floats)
        top_p[:] = 1.0  # rows of padding may never be written
        self._arrays = {
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "seeds": seeds,
            "positions": positions,
        }
        self._positions_view = positions.data
        self._view = view
        self._sequences: list[Sequence] = []

    def write(self, rows: list[LogitsRow]) -> None:
        """Write the parameters of a draw; if its sequences are those of the last draw, only the positions change."""
        sequences = [row.sequence for row in rows]
        arrays, used = self._arrays, slice(len(rows))
        if sequences != self._sequences:
            self._sequences = []  # until all is written, as an error may come in between
            self.needs_only_tokens = all(map(_needs_only_token, sequences))
            self.is_free = all(map(_is_free, rows))
            params = [sequence.params for sequence in sequences]
            arrays["temperature"][used] = [p.temperature for p in params]
            arrays["top_k"][used] = [max(p.top_k, 0) for p in params]
            arrays["top_p"][used] = [p.top_p for p in params]
            arrays["min_p"][used] = [p.min_p for p in params]
            arrays["seeds"][used] = [sequence.seed for sequence in sequences]
            self._sequences = sequences
        write_list(self._positions_view, [row.sequence.num_tokens + len(row.drafts) for row in rows])

    def pad(self, rows: slice) -> None:
        """Make rows of padding greedy, as those cost the least."""
        self._arrays["temperature"][rows] = 0.0

    def rows(self, num_rows: int) -> "SamplingRows":
        """Return the parameters of the first rows."""
        return SamplingRows(self.tensors(num_rows), self.needs_only_tokens, self.is_free)

    def tensors(self, num_rows: int) -> dict[str, Tensor]:
        """Return the parameters of the first rows on the device, [num_rows] each, by their names in ``ops.sample``."""
        return {name: self._view(array, num_rows) for name, array in self._arrays.items()}


@dataclass(frozen=True)
class SamplingRows:
    """The parameters of some rows of a draw, in the interface of :class:`SamplingInputs`.

    Attributes:
        values: [rows] each, by their names in ``ops.sample``.
        needs_only_tokens, is_free: see :class:`SamplingInputs`.
    """

    values: dict[str, Tensor]
    needs_only_tokens: bool
    is_free: bool

    def select(self, index: Tensor) -> "SamplingRows":
        """Return the parameters of some of the rows, [n] int64 on the device."""
        return replace(self, values={name: values[index] for name, values in self.values.items()})

    def tensors(self, num_rows: int) -> dict[str, Tensor]:
        """Return the parameters of the first rows, [num_rows] each."""
        return {name: values[:num_rows] for name, values in self.values.items()}


def _needs_only_token(sequence: Sequence) -> bool:
    """Return whether a sequence has no penalties, no log-probabilities and no bias; it may have a mask."""
    params = sequence.params
    return sequence.counts is None and params.logprobs is None and not params.logit_bias


def _is_free(row: LogitsRow) -> bool:
    """Return whether a row may get any token, also in later steps, and has no logits processors."""
    has_mask = row.grammar is not None or row.sequence.token_rules is not None or row.sequence.params.min_tokens > 0
    return not has_mask and not row.processors
