"""Which rows of a layer's matrices each rank has, by the names of :mod:`fastinfer.models.checkpoint`."""

import torch
from torch import Tensor

from fastinfer.parallel.division import Division

INPUTS = ("gate_proj", "up_proj")
OUTPUTS = ("o_proj", "down_proj")


def local_rows(division: Division, name: str) -> Tensor | None:
    """Return the rank's rows of a layer's matrix, [n] int64; ``None`` for one that every rank has."""
    part, rank, dim = name.rpartition(".")[2], division.rank, division.config.head_dim
    if part == "q_proj":
        return rows_of_heads(division.query_heads()[rank], dim)
    if part in ("k_proj", "v_proj"):
        return rows_of_heads(division.kv_heads()[rank], dim)
    if part in INPUTS or part in OUTPUTS:
        return rows_of_heads(division.tiles(num_rows(division, name))[rank], 1)
    return None


def adapter_rows(division: Division, layer: int, module: str) -> Tensor | None:
    """Return the rank's rows of an adapter's update of a module, as :func:`local_rows`.

    Updates are added to whole hidden states: all ranks have all rows of output projections.
    """
    if module.rpartition(".")[2] in OUTPUTS or module == "lm_head":
        return None
    return local_rows(division, f"layers.{layer}.{module}")


def num_rows(division: Division, name: str) -> int:
    """Return the number of rows of a divided matrix."""
    config, part = division.config, name.rpartition(".")[2]
    if part in OUTPUTS:
        return config.hidden_size
    if part in INPUTS:
        return division.inner_size(name)
    return config.head_dim * (config.num_heads if part == "q_proj" else config.num_kv_heads)


def input_widths(division: Division, name: str) -> list[int]:
    """Return the numbers of columns of an output projection's input that the ranks have."""
    if name.endswith(".o_proj"):
        return [len(heads) * division.config.head_dim for heads in division.query_heads()]
    return [len(part) for part in division.tiles(division.inner_size(name))]


def rows_of_heads(heads: range, dim: int) -> Tensor:
    """Return the numbers of the rows of some heads of ``dim`` rows each.

    A tensor: selected by a slice, they would keep the whole matrix in memory.
    """
    return torch.arange(heads.start * dim, heads.stop * dim)
