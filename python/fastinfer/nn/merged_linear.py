"""Linear layers with one input, computed as one, under their own names in the state."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fastinfer.nn.linear import PACKED, Linear, QuantLinear
from fastinfer.ops.pack import TILE_ROWS, interleave_gate_up

UNITS = dict.fromkeys(("weight", "bias"), 1) | dict.fromkeys(PACKED, TILE_ROWS)  # rows of an element of the state


def merge_linears(
    layers: Sequence[nn.Linear],
    interleaved: bool,
    quantize: str | None,
    group_size: int | None = None,
    activation_bits: int = 8,
) -> Linear | QuantLinear:
    """One layer whose rows are those of several: below each other, or two of them interleaved in runs of 16.

    Layers that are quantised already are joined as they are.

    Raises:
        ValueError: numbers of inputs differ, some layers alone have a bias or are quantised, or otherwise than others,
            or rows are no multiple of 16.
    """
    if len({layer.in_features for layer in layers}) > 1:
        raise ValueError(f"layers must have one number of inputs, got {[layer.in_features for layer in layers]}")
    if len({layer.bias is None for layer in layers}) > 1:
        raise ValueError("layers must all have a bias, or none")
    if any(layer.out_features % TILE_ROWS for layer in layers):
        rows = [layer.out_features for layer in layers]
        raise ValueError(f"layers must have a multiple of {TILE_ROWS} rows, got {rows}")

    def join(values: Sequence[Tensor]) -> nn.Parameter:
        detached = [t.detach() for t in values]
        return nn.Parameter(interleave_gate_up(*detached) if interleaved else torch.cat(detached), requires_grad=False)

    first = layers[0]
    stacked: Linear | QuantLinear
    if any(isinstance(layer, QuantLinear) for layer in layers):
        stacked = _stack_tiles(layers, interleaved)
    else:
        stacked = Linear(first.in_features, sum(layer.out_features for layer in layers), bias=False, device="meta")
        stacked.weight = join([layer.weight for layer in layers])
        if quantize is not None:
            stacked = QuantLinear.from_linear(stacked, quantize, group_size, activation_bits)
    if first.bias is not None:
        stacked.bias = join([layer.bias for layer in layers])
    return stacked


def _stack_tiles(layers: Sequence[nn.Linear], interleaved: bool) -> QuantLinear:
    """The rows of packed weights, 16 to a tile; without a bias."""
    forms = {
        (layer.kind, layer.group_size, layer.activation_bits) if isinstance(layer, QuantLinear) else "dense"
        for layer in layers
    }
    first = layers[0]
    if len(forms) > 1 or not isinstance(first, QuantLinear):
        raise ValueError(f"layers must all be quantised in one way, got {', '.join(sorted(map(str, forms)))}")
    stacked = QuantLinear(
        first.in_features,
        sum(layer.out_features for layer in layers),
        bias=False,
        kind=first.kind,
        group_size=first.group_size,
        activation_bits=first.activation_bits,
        device="meta",
    )
    for name in PACKED:
        if getattr(first, name) is not None:
            parts = [getattr(layer, name) for layer in layers]
            setattr(stacked, name, torch.stack(parts, 1).flatten(0, 1) if interleaved else torch.cat(parts))
    stacked.table = first.table
    return stacked


class MergedRows(nn.Module):
    """Stands where a layer was before it was stacked. Adapters look for it by its name, and would be left out silently
    if they did not find it; PEFT refuses this module with an error that shows it.
    """

    def __init__(self, stacked: str) -> None:
        super().__init__()
        self.stacked = stacked

    def extra_repr(self) -> str:
        return f"rows of {self.stacked}; adapters need fastinfer.integrations.transformers.replace(..., fuse=False)"


def name_rows(module: nn.Module, stacked: str, names: Sequence[str], sizes: Sequence[int], interleaved: bool) -> None:
    """Let a module's state have the rows of one of its layers under the names of those that were stacked.

    Args:
        module: whose state it is.
        stacked: its layer, of :func:`merge_linears`.
        names: of the layers that it was made of.
        sizes: their rows.
        interleaved: how they were joined.
    """
    rows = _NamedRows(stacked, tuple(names), tuple(sizes), interleaved)
    for name in names:
        module.add_module(name, MergedRows(stacked))
    module.register_state_dict_post_hook(partial(_NamedRows.save, rows))  # torch marks its hooks, which methods forbid
    module.register_load_state_dict_pre_hook(partial(_NamedRows.load, rows))


@dataclass(frozen=True)
class _NamedRows:
    """The hooks of :func:`name_rows`."""

    stacked: str
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    interleaved: bool

    def save(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for kind, unit in UNITS.items():
            values = state.pop(f"{prefix}{self.stacked}.{kind}", None)
            if values is not None:
                for name, part in zip(self.names, self._split(values, unit), strict=True):
                    state[f"{prefix}{name}.{kind}"] = part

    def load(self, module: nn.Module, state: dict[str, Any], prefix: str, *args: Any) -> None:
        for kind, unit in UNITS.items():
            keys = [f"{prefix}{name}.{kind}" for name in self.names]
            if all(key in state for key in keys):
                state[f"{prefix}{self.stacked}.{kind}"] = self._join([state.pop(key) for key in keys], unit)

    def _split(self, values: Tensor, unit: int) -> Sequence[Tensor]:
        if self.interleaved:
            parts = values.unflatten(0, (-1, len(self.names), TILE_ROWS // unit)).unbind(1)
            return [part.flatten(0, 1).contiguous() for part in parts]  # safetensors takes no strides
        return values.split([size // unit for size in self.sizes])

    def _join(self, parts: Sequence[Tensor], unit: int) -> Tensor:
        if self.interleaved:
            return torch.stack([part.unflatten(0, (-1, TILE_ROWS // unit)) for part in parts], 1).flatten(0, 2)
        return torch.cat(list(parts))
