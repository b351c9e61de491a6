"""Settings of the calling thread that operators read."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

Value = TypeVar("Value", bool, int)


@contextmanager
def changed(name: str, operator: Callable[[Value], Value], value: Value) -> Iterator[Value]:
    """Change a setting inside the ``with`` block, and give its value from before.

    Args:
        name: name of the setting, for the error.
        operator: sets it and returns the previous value.
        value: what it is set to.

    Raises:
        RuntimeError: the block is traced.
    """
    before = _set(name, operator, value)
    try:
        yield before
    finally:
        _set(name, operator, before)


def _set(name: str, operator: Callable[[Value], Value], value: Value) -> Value:
    # Tracing would run the operator and keep its result as a constant. torch.compiler.disable would prevent that, but
    # it imports the compiler, which takes two seconds.
    if torch.compiler.is_compiling():
        raise RuntimeError(f"{name} cannot be compiled: call compiled functions within it")
    return operator(value)
