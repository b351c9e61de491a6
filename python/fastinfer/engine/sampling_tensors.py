"""Sampling parameters of a draw as tensors, which are the arguments of ``ops.sample``."""

import numpy as np
import torch
from torch import Tensor

from fastinfer.engine.logits_row import LogitsRow
from fastinfer.engine.penalty_tensors import PenaltyTensors
from fastinfer.engine.sequence import Sequence
from fastinfer.engine.transfer import to_device


class SamplingTensors:
    """Sampling parameters of the rows of a draw, on the device of the logits.

    On a CPU they stay at the same addresses, so that recorded draws can read them.

    Args:
        max_rows: maximum number of rows in a draw.
        vocab_size: number of columns of the logits.

    Attributes:
        every_row: the parameters that every row has, [rows] each, by their names in ``ops.sample``.
        needs_only_tokens: whether no row needs log-probabilities, penalties or a bias.
        device: device of the logits.
    """

    def __init__(self, max_rows: int, vocab_size: int) -> None:
        self.every_row: dict[str, Tensor] = {}
        self.needs_only_tokens = False
        # Kept here because asking a tensor for its device takes 10 to 25 us right after a step, when the CPU's caches
        # are cold.
        self.device, self._on_gpu = torch.device("cpu"), False
        self._penalties = PenaltyTensors(vocab_size)
        self._arrays: dict[str, np.ndarray] = {
            "temperature": np.zeros(max_rows, np.float32),
            "top_k": np.zeros(max_rows, np.int32),
            "top_p": np.zeros(max_rows, np.float32),
            "min_p": np.zeros(max_rows, np.float32),
            "seeds": np.zeros(max_rows, np.int64),
            "positions": np.zeros(max_rows, np.int64),
        }
        self._sequences: list[Sequence] = []

    def write(self, rows: list[LogitsRow], logits: Tensor) -> None:
        """Update ``every_row`` for a draw; if its sequences are those of the last draw, only the positions change."""
        sequences = [row.sequence for row in rows]
        arrays, used = self._arrays, slice(len(rows))
        changed = sequences != self._sequences
        if changed:
            self._sequences = []  # until all is written, as an error may come in between
            self.needs_only_tokens = all(map(_needs_only_token, sequences))
            self.device, self._on_gpu = logits.device, logits.is_cuda
            params = [sequence.params for sequence in sequences]
            arrays["temperature"][used] = [p.temperature for p in params]
            arrays["top_k"][used] = [max(p.top_k, 0) for p in params]
            arrays["top_p"][used] = [p.top_p for p in params]
            arrays["min_p"][used] = [p.min_p for p in params]
            arrays["seeds"][used] = [sequence.seed for sequence in sequences]
        positions = arrays["positions"]
        for index, row in enumerate(rows):
            sequence, drafts = row.sequence, row.drafts
            positions[index] = sequence.num_tokens + len(drafts)
        if changed:
            self.every_row = {name: to_device(array[used], self.device) for name, array in arrays.items()}
            self._sequences = sequences
        elif self._on_gpu:
            self.every_row["positions"] = to_device(positions[used], self.device)

    def penalties(self, rows: list[LogitsRow]) -> dict[str, Tensor]:
        """Return the penalties and the token counts that they need; empty if no row has penalties."""
        return self._penalties.update(rows, self.device)

    def bias(self, rows: list[LogitsRow]) -> dict[str, Tensor]:
        """Return the logit biases; empty if no row has any."""
        biases = [row.sequence.params.logit_bias or {} for row in rows]
        if not any(biases):
            return {}
        arrays = {
            "bias_start": np.cumsum([0, *map(len, biases)], dtype=np.int32),
            "bias_tokens": np.array([t for bias in biases for t in bias], np.int32),
            "bias_values": np.array([v for bias in biases for v in bias.values()], np.float32),
        }
        return {name: to_device(array, self.device) for name, array in arrays.items()}

    def mask(self, masks: np.ndarray | None) -> dict[str, Tensor]:
        """Return the token masks; empty if every token is allowed."""
        return {} if masks is None else {"mask": to_device(masks, self.device)}


def _needs_only_token(sequence: Sequence) -> bool:
    """Return whether a sequence has no penalties, no log-probabilities and no bias; it may have a mask."""
    params = sequence.params
    return sequence.counts is None and params.logprobs is None and not params.logit_bias
