"""Copies of tensors from one device to another, between two parts of a step."""

from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def moved(value: T, device: str) -> T:
    """Copy a tensor, or all tensors of a batch, a routing or other inputs, to a device, also if they are there already.

    Copies between a GPU and host memory go through pinned memory and are queued on the GPU's current stream. A copy in
    host memory is complete when this function returns.

    Args:
        value: a tensor, or tuples and dataclasses that contain tensors. Dictionaries, of adapters, stay as they are.
        device: device of the copy.
    """
    sources: set[torch.device] = set()
    copy: T = _copied(value, torch.device(device), sources)
    if device == "cpu":
        for source in sources:
            if source.type == "cuda":
                torch.cuda.current_stream(source).synchronize()
    return copy


def _copied(value: Any, device: torch.device, sources: set[torch.device]) -> Any:
    if isinstance(value, Tensor):
        sources.add(value.device)
        if value.device.type == "cpu" and device.type == "cuda":
            value = value.pin_memory()
        return value.to(device, non_blocking=True, copy=True)  # from a GPU to host memory, torch pins the copy
    if isinstance(value, tuple):
        items = [_copied(item, device, sources) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value)]
        return replace(value, **{name: _copied(getattr(value, name), device, sources) for name in names})
    return value
