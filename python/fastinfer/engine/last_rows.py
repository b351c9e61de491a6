"""The rows of a step whose hidden states are wanted, for models whose last layers store nothing in the cache."""

from collections.abc import Callable

import numpy as np
from torch import Tensor

from fastinfer.engine.chunk import Chunk
from fastinfer.models.batch import LastRows


class LastRowsInputs:
    """The last rows of each sequence, at addresses that never change, so that recorded graphs can read them.

    Args:
        longs: [2, max_tokens] int64, host memory of the inputs.
        ints: [max_tokens + max_seqs + 1] int32, likewise.
        view: function that returns the first elements of an array in this memory as a tensor on the device.
    """

    def __init__(self, longs: np.ndarray, ints: np.ndarray, view: Callable[[np.ndarray, int], Tensor]) -> None:
        self._rows, self._positions = longs
        self._adapter_ids, self._query_start = np.split(ints, [longs.shape[1]])
        self._view = view

    def fill(
        self, chunks: list[Chunk], ends: list[int], positions: np.ndarray, adapter_ids: np.ndarray, logits: np.ndarray
    ) -> int:
        """Write the wanted rows of a step, and set the chunks' ``hidden_rows`` to their places among them.

        Args:
            chunks: the step's chunks.
            ends: for each, the index of the row behind its last one.
            positions: [tokens] int64; positions of all rows.
            adapter_ids: [tokens] int32; their adapters.
            logits: [n] int64; rows whose logits are computed; replaced by their places among the wanted rows.

        Returns:
            The number of wanted rows.
        """
        counts = [chunk.num_wanted_rows for chunk in chunks]
        own_ends = np.cumsum(counts)
        rows = np.arange(own_ends[-1]) + np.repeat(ends - own_ends, counts)
        self._rows[: len(rows)] = rows
        self._positions[: len(rows)] = positions[rows]
        self._adapter_ids[: len(rows)] = adapter_ids[rows]
        self._query_start[1 : len(chunks) + 1] = own_ends
        logits[:] = np.searchsorted(rows, logits)
        for chunk, count, end in zip(chunks, counts, own_ends.tolist(), strict=True):
            chunk.hidden_rows = slice(end - count, end)
        return len(rows)

    def pad(self, seqs: slice, rows: slice) -> None:
        """Let sequences of padding have no queries, and rows of padding repeat the first token without an adapter."""
        self._rows[rows] = 0
        self._adapter_ids[rows] = -1
        self._query_start[seqs.start + 1 : seqs.stop + 1] = rows.start

    def tensors(self, num_seqs: int, num_rows: int, first_prompt_row: int, *, has_adapters: bool) -> LastRows:
        """Return the rows as views of the inputs, which later steps overwrite."""
        return LastRows(
            rows=self._view(self._rows, num_rows),
            positions=self._view(self._positions, num_rows),
            query_start=self._view(self._query_start, num_seqs + 1),
            adapter_ids=self._view(self._adapter_ids, num_rows) if has_adapters else None,
            first_prompt_row=first_prompt_row,
        )
