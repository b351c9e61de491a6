"""A checkpoint of which one rank reads its part."""

from collections import Counter
from collections.abc import Hashable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from fastinfer.errors import UnsupportedModelError
from fastinfer.formats.unpacked import Unpacked
from fastinfer.models.checkpoint import Checkpoint, ModelPart
from fastinfer.models.config import ModelConfig
from fastinfer.parallel.division import Division
from fastinfer.parallel.matrix_rows import (
    OUTPUTS,
    columns_of_rank,
    divided_rows,
    has_columns,
    input_widths,
    rows_of_rank,
)


class ShardedCheckpoint:
    """Checkpoint that looks like that of a smaller model, the part of one rank.

    A loader asks for the sizes of the smaller model. With the layout ``"gather"`` matrices keep all their columns.

    Args:
        whole: the checkpoint of the whole model.
        division: division of the model.
    """

    def __init__(self, whole: Checkpoint, division: Division) -> None:
        self._whole = whole
        self._division = division
        self._config = division.local_config

    @property
    def path(self) -> Path:
        """Path of the file or folder."""
        return self._whole.path

    @property
    def files(self) -> list[Path]:
        """Paths of all files on which the loaded model may depend."""
        return self._whole.files

    @property
    def config(self) -> ModelConfig:
        """Sizes and constants of the rank's part."""
        return self._config

    def weight_bytes(self, device: str) -> int:
        """Estimate the size of the whole model's weights."""
        return self._whole.weight_bytes(device)

    def part_bytes(self, device: str) -> Counter[ModelPart]:
        """Estimate the sizes of the parts of the whole model."""
        return self._whole.part_bytes(device)

    def __contains__(self, name: str) -> bool:
        return name in self._whole

    def linear(self, name: str, out_features: int, in_features: int) -> Unpacked:
        """Read the rank's rows or columns of a matrix, see :meth:`fastinfer.models.checkpoint.Checkpoint.linear`."""
        if name.rpartition(".")[2] in OUTPUTS:
            widths = input_widths(self._division, name)
            in_features = in_features if widths is None else sum(widths)
        parts = divided_rows(self._division, name)
        if not parts:
            whole = self._whole.linear(name, out_features, in_features)
            return self._columns(name, whole) if has_columns(self._division, name) else whole
        whole = self._whole.linear(name, sum(part.total for part in parts), in_features)
        return whole.rows(rows_of_rank(parts, self._division.rank))

    def _columns(self, name: str, whole: Unpacked) -> Unpacked:
        """Return the rank's columns of a matrix."""
        try:
            return whole.columns(columns_of_rank(self._division, name))
        except ValueError as error:
            raise UnsupportedModelError(
                f"{self.path}: {name}: tensor_parallel_layout must be gather for this model, got reduce: {error}"
            ) from error

    def parts(self, name: str, out_features: int, in_features: int) -> Iterator[Unpacked]:
        """Read the rank's rows of a matrix of the vocabulary in consecutive parts."""
        wanted = self._division.tiles(out_features)[self._division.rank]
        first = 0
        for part in self._whole.parts(name, out_features, in_features):
            count = part.shape[0]
            start, end = max(wanted.start - first, 0), min(wanted.stop - first, count)
            if start < end:
                yield part.rows(torch.arange(start, end))
            first += count

    def vector(self, name: str, size: int) -> Tensor:
        """Read a vector, or the rank's part of one: of a bias, or of numbers of its heads."""
        parts = divided_rows(self._division, name.removesuffix(".bias"))
        if not parts:
            return self._whole.vector(name, size)
        whole = self._whole.vector(name, sum(part.total for part in parts))
        return whole[rows_of_rank(parts, self._division.rank)]

    def draft_tokens(self) -> Tensor | None:
        """Return ``None``: a draft model is not divided."""
        return self._whole.draft_tokens()

    def layout(self, layer: int) -> Hashable:
        """Return the layout of the whole layer."""
        return self._whole.layout(layer)

    def unread(self) -> list[str]:
        """Return none: a rank does not read the experts of others."""
        return []

    def release(self) -> None:
        """Free the memory of data that was read."""
        self._whole.release()
