"""The compiled library's operators, ``ops``: the rest of ``fastinfer.ops`` calls the library through this object."""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor, is_grad_enabled

# After torch, because the extension resolves its symbols against the libtorch that torch has loaded.
from fastinfer import _C  # noqa: F401
from fastinfer.utils.checks import show

R = TypeVar("R", covariant=True)


class Operator(Protocol[R]):
    """One operator: ``default`` returns the result.

    ``out`` writes it into its keyword argument ``out``, and ``inplace`` into its first arguments.
    """

    __name__: str

    @property
    def default(self) -> Callable[..., R]: ...

    @property
    def out(self) -> Callable[..., None]: ...

    @property
    def inplace(self) -> Callable[..., None]: ...


class SelectPages(Operator[tuple[Tensor, Tensor]], Protocol):
    """The operator whose overload ``rest`` also attends to the pages that it does not choose."""

    @property
    def rest(self) -> Callable[..., tuple[Tensor, Tensor]]: ...


class Operators(Protocol):
    """All operators, with their result types; an operator that is not listed returns one tensor."""

    add_lora: Operator[None]
    head_rows: Operator[tuple[Tensor, Tensor]]
    merge_attention_states: Operator[tuple[Tensor, Tensor]]
    norm_rotary_store: Operator[None]
    quantize_int8: Operator[tuple[Tensor, Tensor]]
    rms_norm_quantize: Operator[tuple[Tensor, Tensor]]
    rotary_embedding: Operator[None]
    route_experts: Operator[tuple[Tensor, Tensor, Tensor, Tensor]]
    sample: Operator[tuple[Tensor, Tensor, Tensor, Tensor]]
    select_pages: SelectPages
    set_batch_invariant: Operator[bool]
    set_constant_weights: Operator[bool]
    set_dependent_launches: Operator[bool]
    set_first_prompt_row: Operator[int]
    softcap: Operator[None]
    store_kv_cache: Operator[None]
    store_value_codes: Operator[None]

    def __getattr__(self, name: str) -> Operator[Tensor]: ...


ops = cast(Operators, torch.ops.fastinfer)


def inference_only(op: str, names: str, x: Tensor, other: Tensor | None = None) -> None:
    """Raise an error if an activation requires a gradient while gradients are recorded. Weights may be Parameters.

    This takes 0.2 us of a call's 5 us. A decorator, or a loop over more arguments, would cost twice that.

    Args:
        op: the operator, for the message.
        names: names of ``x`` and ``other``, separated by a space.
        x: an activation.
        other: another activation, or ``None``.
    """
    try:
        needs_gradient = x.requires_grad or (other is not None and other.requires_grad)
    except AttributeError:
        check_tensors(op, **dict(zip(names.split(), (x,) if other is None else (x, other), strict=False)))
        raise
    if needs_gradient and is_grad_enabled():
        name = names.split()[0 if x.requires_grad else 1]
        raise RuntimeError(
            f"fastinfer.ops.{op} is an inference kernel without a gradient, and {name} requires grad: "
            f"call it under torch.inference_mode() or torch.no_grad(), or detach {name}"
        )


def check_tensors(op: str, **values: object) -> None:
    """Raise a TypeError unless all values are tensors, for code that runs before torch checks the types.

    Args:
        op: the operator, for the message.
        values: the values by the names of their arguments.
    """
    for name, value in values.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"fastinfer.ops.{op}: {name} must be a tensor, got {show(value)}")


def into(out: Tensor, op: Operator[Tensor], *args: Any) -> Tensor:
    """Call ``op.out``, which writes the result into ``out``, and return ``out``."""
    inference_only(op.__name__, "out", out)
    op.out(*args, out=out)
    return out
