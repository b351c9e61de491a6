"""Merging of linear layers with the same input into one layer, whose state dictionary keeps the original names."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fastinfer.nn.linear import PACKED, Linear, QuantLinear
from fastinfer.ops.pack import TILE_ROWS, interleave_gate_up

# Outputs per entry of a tensor's first dimension: packed tensors have one entry per tile.
ROWS_PER_ENTRY = dict.fromkeys(("weight", "bias"), 1) | dict.fromkeys(PACKED, TILE_ROWS)


def merge_linears(
    layers: Sequence[nn.Linear],
    interleaved: bool,
    quantize: str | None,
    group_size: int | None = None,
    activation_bits: int = 8,
) -> Linear | QuantLinear:
    """Create one layer with the rows of several. Layers that are quantised already are merged without rounding again.

    Args:
        layers: layers with the same number of inputs.
        interleaved: interleave the rows of two layers in runs of 16, instead of concatenating the layers.
        quantize: a kind of :class:`QuantLinear` to quantise dense layers to, or ``None``.
        group_size, activation_bits: see :class:`QuantLinear`.

    Raises:
        ValueError: the layers differ in their number of inputs, in having a bias or in their quantisation, or a number
            of rows is not a multiple of 16.
    """
    if len({layer.in_features for layer in layers}) > 1:
        raise ValueError(f"layers must have one number of inputs, got {[layer.in_features for layer in layers]}")
    if len({layer.bias is None for layer in layers}) > 1:
        biases = ["none" if layer.bias is None else "a bias" for layer in layers]
        raise ValueError(f"layers must all have a bias, or none of them, got {', '.join(biases)}")
    if any(layer.out_features % TILE_ROWS for layer in layers):
        rows = [layer.out_features for layer in layers]
        raise ValueError(f"layers must have a multiple of {TILE_ROWS} rows, got {rows}")

    def merge(values: Sequence[Tensor]) -> nn.Parameter:
        detached = [t.detach() for t in values]
        return nn.Parameter(interleave_gate_up(*detached) if interleaved else torch.cat(detached), requires_grad=False)

    first = layers[0]
    merged: Linear | QuantLinear
    if any(isinstance(layer, QuantLinear) for layer in layers):
        merged = _merge_quantized(layers, interleaved)
    else:
        merged = Linear(first.in_features, sum(layer.out_features for layer in layers), bias=False, device="meta")
        merged.weight = merge([layer.weight for layer in layers])
        if quantize is not None:
            merged = QuantLinear.from_linear(merged, quantize, group_size, activation_bits)
    if first.bias is not None:
        merged.bias = merge([layer.bias for layer in layers])
    return merged


def _merge_quantized(layers: Sequence[nn.Linear], interleaved: bool) -> QuantLinear:
    """Merge packed weights tile by tile; the result has no bias."""
    forms = {
        (layer.kind, layer.group_size, layer.activation_bits) if isinstance(layer, QuantLinear) else "dense"
        for layer in layers
    }
    first = layers[0]
    if len(forms) > 1 or not isinstance(first, QuantLinear):
        raise ValueError(f"layers must all be quantised in one way, got {', '.join(sorted(map(str, forms)))}")
    merged = QuantLinear(
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
            setattr(merged, name, torch.stack(parts, 1).flatten(0, 1) if interleaved else torch.cat(parts))
    merged.table = first.table
    return merged


class MergedRows(nn.Module):
    """Placeholder under the name of a layer that was merged into another one.

    Adapter libraries look for layers by name and would silently skip a missing one; PEFT refuses this module with an
    error that shows its text.

    Args:
        merged: name of the layer that now has the rows.
    """

    def __init__(self, merged: str) -> None:
        super().__init__()
        self.merged = merged

    def extra_repr(self) -> str:
        return f"rows of {self.merged}; adapters need fastinfer.integrations.transformers.replace(..., fuse=False)"


def name_rows(module: nn.Module, merged: str, names: Sequence[str], sizes: Sequence[int], interleaved: bool) -> None:
    """Make a module save and load the rows of a merged layer under the names of the original layers.

    Args:
        module: module that has the merged layer.
        merged: name of the merged layer, made by :func:`merge_linears`.
        names: names of the original layers.
        sizes: numbers of rows of the original layers.
        interleaved: the value given to :func:`merge_linears`.
    """
    rows = _NamedRows(merged, tuple(names), tuple(sizes), interleaved)
    for name in names:
        module.add_module(name, MergedRows(merged))
    # torch sets an attribute on a hook, which bound methods do not allow.
    module.register_state_dict_post_hook(partial(_NamedRows.save, rows))
    module.register_load_state_dict_pre_hook(partial(_NamedRows.load, rows))


@dataclass(frozen=True)
class _NamedRows:
    """State-dictionary hooks of :func:`name_rows`."""

    merged: str
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    interleaved: bool

    def save(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for kind, rows in ROWS_PER_ENTRY.items():
            values = state.pop(f"{prefix}{self.merged}.{kind}", None)
            if values is not None:
                for name, part in zip(self.names, self._split(values, rows), strict=True):
                    state[f"{prefix}{name}.{kind}"] = part

    def load(self, module: nn.Module, state: dict[str, Any], prefix: str, *args: Any) -> None:
        for kind, rows in ROWS_PER_ENTRY.items():
            keys = [f"{prefix}{name}.{kind}" for name in self.names]
            if all(key in state for key in keys):
                state[f"{prefix}{self.merged}.{kind}"] = self._join([state.pop(key) for key in keys], rows)

    def _split(self, values: Tensor, rows_per_entry: int) -> Sequence[Tensor]:
        if self.interleaved:
            parts = values.unflatten(0, (-1, len(self.names), TILE_ROWS // rows_per_entry)).unbind(1)
            return [part.flatten(0, 1).contiguous() for part in parts]  # safetensors cannot store strided tensors
        return torch.split(values, [size // rows_per_entry for size in self.sizes])

    def _join(self, parts: Sequence[Tensor], rows_per_entry: int) -> Tensor:
        if self.interleaved:
            runs = [part.unflatten(0, (-1, TILE_ROWS // rows_per_entry)) for part in parts]
            return torch.stack(runs, 1).flatten(0, 2)
        return torch.cat(list(parts))
