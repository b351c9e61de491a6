"""Reading of gate and up of an MLP or an expert, whose rows become those of one weight."""

from collections.abc import Sequence

from torch import Tensor

from fastinfer.errors import UnsupportedModelError
from fastinfer.formats.gguf_rows import GGUFRows
from fastinfer.formats.unpacked import Unpacked, combine, in_one_form
from fastinfer.models.config import ModelConfig
from fastinfer.models.layer_reader import LayerReader
from fastinfer.ops.pack import TILE_ROWS, interleave_gate_up

GATE_UP = ("gate_proj", "up_proj")


def read_gate_up(reader: LayerReader, owner: str, inner: int, width: int | None = None) -> Unpacked:
    """Read gate and up of a layer or an expert, and interleave their rows; see :func:`read_input`."""
    width = width or reader.config.hidden_size
    gate, up = (reader.checkpoint.linear(f"{owner}.{name}", inner, width) for name in GATE_UP)
    parts: Sequence[Unpacked] | None = (gate, up)
    if not gate.fits(up):
        parts = in_one_form([part.unpack() if isinstance(part, GGUFRows) else part for part in (gate, up)])
    if parts is None or inner % TILE_ROWS:
        raise UnsupportedModelError(
            f"{reader.checkpoint.path}: {owner}: gate and up must have one form and a multiple of "
            f"{TILE_ROWS} rows, got {gate.kind} and {up.kind} with {inner}"
        )
    return _interleave(*parts)


def read_gate_up_bias(reader: LayerReader, owner: str, inner: int) -> Tensor:
    """Read the biases of gate and up, and interleave them as their rows."""
    return interleave_gate_up(*(reader.vector(f"{owner}.{name}.bias", inner) for name in GATE_UP))


def input_names(config: ModelConfig) -> tuple[str, ...]:
    """Return the names of gate and up, or of up alone."""
    return GATE_UP if config.gated else GATE_UP[1:]


def read_input(reader: LayerReader, owner: str, inner: int, width: int | None = None) -> Unpacked:
    """Read gate and up of an expert, or up alone; ``width`` is its number of inputs, the hidden size if ``None``."""
    if reader.config.gated:
        return read_gate_up(reader, owner, inner, width)
    return reader.checkpoint.linear(f"{owner}.up_proj", inner, width or reader.config.hidden_size)


def _interleave(gate: Unpacked, up: Unpacked) -> Unpacked:
    """Interleave the rows of gate and up in runs of 16."""
    return combine([gate, up], lambda rows: interleave_gate_up(*rows))
