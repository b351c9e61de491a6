"""Finds tensors that an emulated test has made without ``device=``.

On the emulator all tensors lie in host memory, so that nothing else would notice. On a GPU the test would call the
CPU's operator, or end with an error.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

EMULATED = "fastinfer_emulated"


class EmulatedDevice(str):
    """The value of the ``device`` fixture: "cpu" for torch, and told apart from a device that nobody chose."""


class Placement(TorchFunctionMode):
    """Follows the tensors that are made while it is active; operators refuse those of the host.

    A tensor is the host's if it is made without ``device``, or from the host's tensors alone. One that is moved, or
    computed together with a tensor of the device, is the device's. So is what was made before, or by functions that
    torch does not announce, such as ``torch.from_numpy``.
    """

    allows_host: ClassVar[bool] = False

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "namespace", None) == EMULATED and not self.allows_host:
            _check(func, args, kwargs)
        result = func(*args, **kwargs)
        if isinstance(result, Tensor):
            return _place(result, func, args, kwargs)
        if isinstance(result, tuple | list) and any(isinstance(value, Tensor) for value in result):
            for value in result:
                if isinstance(value, Tensor):
                    _place(value, func, args, kwargs)
        return result


@contextmanager
def host_operators() -> Iterator[None]:
    """Let operators take tensors of the host, for which a machine with a GPU has the CPU's."""
    Placement.allows_host = True
    try:
        yield
    finally:
        Placement.allows_host = False


def is_on_host(tensor: Tensor) -> bool:
    return getattr(tensor, "_made_on_host", False)


def _place(result: Tensor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    devices = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.device | EmulatedDevice)]
    tensors = list(_tensors((args, kwargs)))
    on_host = all(map(is_on_host, tensors)) and not devices
    if any(result is tensor for tensor in tensors):
        if func is not Tensor.to or on_host or not is_on_host(result):
            return result
        result = result.detach()  # on a GPU a copy
    result._made_on_host = on_host  # type: ignore[attr-defined]
    return result


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, tuple | list):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, dict):
        yield from _tensors(tuple(values.values()))


def _check(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for name, value in [*enumerate(args), *kwargs.items()]:
        if any(map(is_on_host, _tensors(value))):
            raise AssertionError(f"argument {name} of {func} was made without the test's device, so on a GPU's host")
