"""Which rows and columns of a layer's tensors each rank has, by the names of :mod:`fastinfer.models.checkpoint`."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fastinfer.models.checkpoint import tiled_rows
from fastinfer.models.state_config import LinearAttentionConfig, Mamba2Config, ShortConvConfig
from fastinfer.parallel.division import Division

INPUTS = ("gate_proj", "up_proj")
OUTPUTS = ("o_proj", "out_proj", "down_proj")


@dataclass(frozen=True)
class Rows:
    """Consecutive rows of a tensor that are divided by units of equal size, such as heads.

    Attributes:
        units: units of each rank.
        count: number of all units.
        size: rows of a unit.
    """

    units: Sequence[range]
    count: int
    size: int = 1

    @property
    def total(self) -> int:
        """Number of all rows."""
        return self.count * self.size

    def of(self, rank: int) -> range:
        """Return the rows of a rank."""
        return range(self.units[rank].start * self.size, self.units[rank].stop * self.size)


def adapter_rows(division: Division, layer: int, module: str) -> Tensor | None:
    """Return the rank's rows of an adapter's update of a module; ``None`` for all rows.

    Updates are added to whole hidden states: all ranks have all rows of output projections.
    """
    part, name = module.rpartition(".")[2], f"layers.{layer}.{module}"
    if part in OUTPUTS or part == "lm_head":
        return None
    if part == "v_proj":  # whose values have as many elements as keys here
        part, name = "k_proj", name.replace("v_proj", "k_proj")
    rows = divided_rows(division, name.removesuffix("_dt"))
    config = division.config
    if config.output_gate and config.latent_attention is None and part in ("q_proj", "output_gate"):
        size = config.gate_size(layer) if part == "output_gate" else config.q_size(layer)
        rows = [_query_rows(division, layer, size)]
    elif part in ("in_proj", "in_proj_dt") and isinstance(config.states, Mamba2Config):
        rows = rows[:-1] if part == "in_proj" else rows[-1:]
    return rows_of_rank(rows, division.rank) if rows else None


def input_widths(division: Division, name: str) -> list[int] | None:
    """Return the numbers of columns of an output projection's input that the ranks have; ``None`` if all have all."""
    rows = _input_rows(division, name)
    return None if rows is None else [len(rows.of(rank)) for rank in range(division.size)]


def has_columns(division: Division, name: str) -> bool:
    """Return whether the ranks have columns of a matrix, and add their products."""
    is_output = name.startswith("layers.") and name.rpartition(".")[2] in OUTPUTS
    return division.layout == "reduce" and is_output and _input_rows(division, name) is not None


def columns_of_rank(division: Division, name: str) -> Tensor:
    """Return the rank's columns of a matrix, [n] int64, in the order in which their inputs are computed."""
    rows, states = _input_rows(division, name), division.config.states
    assert rows is not None
    own = rows_of_rank([rows], division.rank)
    if name.endswith(".out_proj") and isinstance(states, LinearAttentionConfig) and states.tiled_output:
        return tiled_rows(states, states.value_dim)[own]
    return own


def _input_rows(division: Division, name: str) -> Rows | None:
    """Return the inputs of an output projection as rows of what computes them; None if all ranks have all."""
    config, layer = division.config, int(name.split(".")[1])
    if name.endswith(".out_proj"):
        return None if division.has_whole_states else _state_rows(division, "outputs")[0]
    if name.endswith(".o_proj"):
        return _query_rows(division, layer, config.attention_size(layer))
    if ".experts." in name and division.has_whole_experts:
        return None
    return _inner_tiles(division, division.inner_size(name))


def divided_rows(division: Division, name: str) -> list[Rows]:
    """Return the rows of a layer's tensor in the order of the file; an empty list for one that every rank has."""
    config, part = division.config, name.rpartition(".")[2]
    if not name.startswith("layers."):
        return []
    if ".experts." in name and division.has_whole_experts:
        return []
    if part in OUTPUTS:
        outputs = division.output_size(name)
        return [] if has_columns(division, name) else [Rows(division.tiles(outputs), outputs)]
    if part in INPUTS:
        return [_inner_tiles(division, division.inner_size(name))]
    layer = int(name.split(".")[1])
    if config.has_state(layer):
        return _state_rows(division, part)
    heads, head_dim = config.query_heads(layer), config.kv_shape(layer).head_dim
    if config.latent_attention is not None:
        size = heads * _latent_sizes(division).get(part, 0)
        return [_query_rows(division, layer, size)] if size else []
    if part in ("k_proj", "v_proj"):
        size = config.value_dim or head_dim if part == "v_proj" else head_dim
        return [Rows(division.kv_heads(layer), config.kv_shape(layer).num_heads, size)]
    # The file's query projection has the gates, too, unless they are a projection of their own.
    num_halves = 2 if config.output_gate and not config.separate_gate else 1
    sizes = {"q_proj": num_halves * heads * head_dim, "output_gate": config.gate_size(layer), "sinks": heads}
    size = sizes.get(part, 0)
    return [_query_rows(division, layer, size)] if size else []


def _query_rows(division: Division, layer: int, size: int) -> Rows:
    """Return rows of which each query head of a layer has as many; ``size`` is their number."""
    heads = division.config.query_heads(layer)
    return Rows(division.query_heads(layer), heads, size // heads)


def _state_rows(division: Division, part: str) -> list[Rows]:
    """Return the rows of a tensor of a layer with states; those of its output for ``"outputs"``."""
    states = division.config.states
    if division.has_whole_states:
        return []
    if isinstance(states, ShortConvConfig):
        channels = _inner_tiles(division, states.conv_dim)
        return {"in_proj": [channels] * 3, "conv1d": [channels], "outputs": [channels]}.get(part, [])
    assert states is not None
    heads, groups = division.state_heads()
    if isinstance(states, LinearAttentionConfig):
        keys = Rows(groups, states.num_key_heads, states.key_dim)
        values = Rows(heads, states.num_value_heads, states.value_dim)
        numbers = Rows(heads, states.num_value_heads)
        decays = Rows(heads, states.num_value_heads, states.key_dim if states.channel_decay else 1)
        return {
            "in_proj_qkv": [keys, keys, values],
            "in_proj_q": [keys],
            "in_proj_k": [keys],
            "in_proj_v": [values],
            "conv1d": [keys, keys, values],
            "in_proj_z": [] if states.gate_rank else [values],
            "in_proj_z_up": [values],
            "in_proj_a": [] if states.decay_rank else [decays],
            "in_proj_a_up": [decays],
            "in_proj_b": [numbers],
            "A_log": [numbers],
            "dt_bias": [decays],
            "outputs": [values],
        }.get(part, [])
    inner = Rows(heads, states.num_heads, states.head_dim)
    shared = Rows(groups, states.num_groups, states.state_dim)
    numbers = Rows(heads, states.num_heads)
    if part in ("A_log", "dt_bias", "D"):
        return [numbers]
    return {
        "in_proj": [inner, inner, shared, shared, numbers],
        "conv1d": [inner, shared, shared],
        "gated_norm": [inner],
        "outputs": [inner],
    }.get(part, [])


def _latent_sizes(division: Division) -> dict[str, int]:
    """Return the rows of a head in the matrices of latent attention."""
    sizes = division.config.latent_attention
    assert sizes is not None
    queries = "q_b_proj" if sizes.query_rank else "q_proj"
    both = sizes.plain_dim + sizes.value_dim
    matrices = {queries: sizes.query_dim, "kv_b_proj": both, "k_b_proj": sizes.rank, "v_b_proj": sizes.value_dim}
    return matrices | {"output_gate": 1}


def _inner_tiles(division: Division, rows: int) -> Rows:
    return Rows(division.inner_tiles(rows), rows)


def rows_of_rank(parts: list[Rows], rank: int) -> Tensor:
    """Return the rank's rows of consecutive parts, [n] int64.

    A tensor: selected by a slice, they would keep the whole matrix in memory.
    """
    first, rows = 0, []
    for part in parts:
        rows.append(torch.arange(first + part.of(rank).start, first + part.of(rank).stop))
        first += part.total
    return torch.cat(rows)
