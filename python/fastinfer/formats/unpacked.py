"""Unpacked weights, the step between a checkpoint and the kernels: separate tensors of integers, scales and minimums.

Every reader of a quantised format returns one of these four forms, and :func:`fastinfer.weights.pack.make_weight` packs
it for the kernels. Rows can be selected, reordered and concatenated without changing a number, and inputs can be
selected.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import torch
from torch import Tensor

U = TypeVar("U", bound="Unpacked")
G = TypeVar("G", bound="Grouped")
# Fewest neighbouring inputs with one scale that the kernels read.
MIN_RUN = 32


@dataclass(frozen=True, eq=False)
class Unpacked(ABC):
    """Weight [out_features, in_features]; tensor fields have one row per output, except those that all rows share."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)."""

    @property
    def kind(self) -> str:
        """Name of the form, for error messages."""
        return type(self).__name__

    @abstractmethod
    def dequantize(self) -> Tensor:
        """Compute the weight as [out_features, in_features] fp32, with inputs in the model's order."""

    def rows(self: U, index: slice | Tensor) -> U:
        """Select rows (outputs), in the order of the index."""
        return replace(self, **{name: values[index] for name, values in self._by_row().items()})

    @abstractmethod
    def columns(self, index: Tensor) -> "Unpacked":
        """Select inputs, in the order of the index; a copy that does not keep the others in memory.

        Args:
            index: [n] int64, the columns.

        Raises:
            ValueError: a quantised weight cannot be cut there, see :class:`Grouped`.
        """

    def fits(self, other: "Unpacked") -> bool:
        """Return whether two weights can be concatenated: same form, group size, dtypes and order of inputs."""
        if type(self) is not type(other) or self._by_row().keys() != other._by_row().keys():
            return False
        mine, theirs = self._by_row(), other._by_row()
        pairs = [(values, theirs[name]) for name, values in mine.items()]
        if any(a.dtype != b.dtype or a.shape[1:] != b.shape[1:] for a, b in pairs):
            return False
        return all(_same(value, getattr(other, name)) for name, value in self._shared().items())

    def _by_row(self) -> dict[str, Tensor]:
        """Return the tensor fields with one row per output, by name, without those that are None."""
        shared = self._shared()
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in shared}
        return {name: value for name, value in values.items() if value is not None}

    def _shared(self) -> dict[str, object]:
        """Return the fields that all rows share, by name."""
        return {}


@dataclass(frozen=True, eq=False)
class Dense(Unpacked):
    """Weight that is not quantised.

    ``values`` is fp32, fp16 or bf16, as in the file. It may share the file's mapped memory, so do not write to it.
    """

    values: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.values.shape
        return rows, columns

    def dequantize(self) -> Tensor:
        return self.values.float()

    def columns(self, index: Tensor) -> "Dense":
        return Dense(self.values[:, index])


@dataclass(frozen=True, eq=False)
class Grouped(Unpacked):
    """Integers with a scale, and optionally a minimum, per row and group of inputs.

    Inputs are selected in runs of 32 neighbours or more, as long as they are not permuted. If a group is cut, its parts
    become groups with the same scale.

    Attributes:
        q: [rows, cols], the integers.
        scales, mins: [rows, groups], both fp16 or both fp32; ``cols / groups`` is a multiple of 32, or
            all of cols. ``mins`` may be ``None``.
        permutation: [cols] int64; column j of ``q`` is the model's input ``permutation[j]``. ``None`` if the columns
            are in the model's order.
    """

    q: Tensor
    scales: Tensor
    mins: Tensor | None = None
    permutation: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.q.shape
        return rows, columns

    def dequantize(self) -> Tensor:
        levels: Tensor = self._levels().unflatten(1, (self.scales.shape[1], -1))
        values = levels * self.scales.float()[..., None]
        if self.mins is not None:
            values = values + self.mins.float()[..., None]
        values = values.flatten(1)
        return values if self.permutation is None else values[:, self.permutation.argsort()]

    def columns(self: G, index: Tensor) -> G:
        groups = self.scales.shape[1]
        size = self.shape[1] // groups
        run = len(index) if groups == 1 else _longest_run(index, size)
        if self.permutation is not None or run == 0 or run % MIN_RUN:
            raise ValueError(
                f"inputs of a quantised weight must be selected in runs of {MIN_RUN} neighbours, and must not be "
                f"permuted (desc_act), got {len(index)} of {self.shape[1]}"
            )
        scales, mins = (None if part is None else part[:, index[::run] // size] for part in (self.scales, self.mins))
        assert scales is not None
        return replace(self, q=self.q[:, index], scales=scales, mins=mins)

    def _levels(self) -> Tensor:
        """Return the values that the integers stand for, before scale and minimum: [rows, cols] fp32."""
        return self.q.float()

    def _shared(self) -> dict[str, object]:
        return {"permutation": self.permutation}


@dataclass(frozen=True, eq=False)
class Int4(Grouped):
    """4-bit integers: w = scale * q + min, or without minimums w = scale * (q - 8); ``q`` is uint8, 0..15."""

    def _levels(self) -> Tensor:
        return self.q.float() - (8.0 if self.mins is None else 0.0)


@dataclass(frozen=True, eq=False)
class Int8(Grouped):
    """8-bit integers: w = scale * q + min, or without minimums w = scale * q; ``q`` is int8.

    Attributes:
        int8_activations: whether the weight was made for inputs that are quantised to int8, with a scale per token
            (W8A8). It then has one scale per row and no minimums.
    """

    int8_activations: bool = False

    def _shared(self) -> dict[str, object]:
        return {"permutation": self.permutation, "int8_activations": self.int8_activations}


@dataclass(frozen=True, eq=False)
class Lut(Grouped):
    """4-bit indices into a look-up table: w = scale * table[q], for NF4 and other formats of 16 values.

    ``q`` is uint8, 0..15; ``table`` is [16] fp32; there are no minimums. NF4: https://arxiv.org/abs/2305.14314.
    """

    table: Tensor | None = None

    @property
    def int8_table(self) -> Tensor | None:
        """Table as [16] int8, as products with quantised inputs need it; ``None`` if an entry is none, as with NF4."""
        assert self.table is not None
        table = self.table.to(torch.int8)
        return table if torch.equal(table.float(), self.table) else None

    def integers(self) -> Int8:
        """Return the weight as integers of 8 bits, without rounding; the table must have an ``int8_table``."""
        table = self.int8_table
        assert table is not None
        return Int8(table[self.q.long()], self.scales, permutation=self.permutation)

    def _levels(self) -> Tensor:
        assert self.table is not None
        return self.table[self.q.long()]

    def _shared(self) -> dict[str, object]:
        return {"permutation": self.permutation, "table": self.table}


def concatenate(parts: Sequence[U]) -> U:
    """Concatenate the rows of several weights, each of which must fit the first."""
    return combine(parts, torch.cat)


def combine(parts: Sequence[U], join: Callable[[list[Tensor]], Tensor]) -> U:
    """Combine the rows of several weights into one weight; each must fit the first.

    ``join`` combines the rows of a field: it gets the field's tensor from each weight and returns one tensor.
    """
    first = parts[0]
    if not all(first.fits(part) for part in parts):
        raise ValueError(f"parts must have one form, got {[part.kind for part in parts]}")
    columns = [part._by_row() for part in parts]
    return replace(first, **{name: join([column[name] for column in columns]) for name in columns[0]})


def in_one_form(parts: Sequence[Unpacked]) -> list[Int8] | None:
    """Convert quantised weights whose forms differ to 8-bit integers in groups of one size, without rounding.

    ``None`` if that is impossible: one of them is dense, has its inputs in another order, is made for int8 activations,
    or has a look-up table of numbers that are no integers of 8 bits.
    """
    if not all(isinstance(part, Int4 | Int8 | Lut) and part.permutation is None for part in parts):
        return None
    weights = [part for part in parts if isinstance(part, Grouped)]
    groups = max(part.scales.shape[1] for part in weights)
    has_mins = any(part.mins is not None for part in weights)
    is_half = all(part.scales.dtype == torch.float16 for part in weights)
    converted = []
    for part in weights:
        q = _eight_bits(part)
        if q is None or groups % part.scales.shape[1]:
            return None
        spread = [
            numbers.repeat_interleave(groups // part.scales.shape[1], 1).to(torch.float16 if is_half else torch.float32)
            for numbers in (part.scales, torch.zeros_like(part.scales) if part.mins is None else part.mins)
        ]
        converted.append(Int8(q, spread[0], spread[1] if has_mins else None))
    return converted


def _eight_bits(weight: Grouped) -> Tensor | None:
    """Return the integers of a weight as int8; None if they have no such form."""
    if isinstance(weight, Int8):
        return None if weight.int8_activations else weight.q
    if isinstance(weight, Lut):
        table = weight.int8_table
        return None if table is None else table[weight.q.long()]
    q = weight.q.to(torch.int8)
    return q - 8 if weight.mins is None else q


def _longest_run(index: Tensor, group: int) -> int:
    """Return the largest size of runs of neighbours that an index consists of, each within one group; 0 for none."""
    for size in (group // parts for parts in range(1, group // MIN_RUN + 1) if group % (parts * MIN_RUN) == 0):
        runs = index.view(-1, size) if len(index) % size == 0 else index.new_zeros(0, size)
        if len(runs) and bool((runs[:, 0] % size == 0).all()) and torch.equal(runs, runs[:, :1] + torch.arange(size)):
            return size
    return 0


def _same(a: object, b: object) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    return a is None and b is None if a is None or b is None else bool(a == b)
