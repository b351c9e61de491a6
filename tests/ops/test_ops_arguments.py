"""Values that are no tensors where an operator takes one: an error that names the argument, and no crash."""

import contextlib
import copy
from typing import Any

import numpy as np
import pytest
import torch
from support.helpers import assert_bitwise
from support.op_calls import named, op_calls
from torch import Tensor

from fastinfer import ops

CALLS = list({name: (name, args) for name, args in op_calls()}.values())
every_call = pytest.mark.parametrize(
    ("name", "args"), [pytest.param(*call, id=f"{call[0]}-{index}") for index, call in enumerate(op_calls())]
)
NO_TENSORS = [1, 1.5, "x", b"x", [1.0, 2.0], np.ones((4, 4), np.float32), object(), {}, torch.float32]
ODD_TENSORS = [
    torch.tensor(1.0),
    torch.empty(0),
    torch.ones(2, 1, 2, 1, 2, 1),
    torch.ones(4, 4).to_sparse(),
    torch.ones(4, 4, dtype=torch.complex64),
]


def calls_with(name: str, args: tuple[Any, ...], values: list[Any]) -> Any:
    """The arguments of the call with one tensor after the other replaced by each of the values."""
    arguments = named(name, args)
    for key in [key for key, value in arguments.items() if isinstance(value, Tensor)]:
        for value in values:
            yield key, copy.deepcopy(arguments) | {key: value}


@pytest.mark.parametrize(("name", "args"), [pytest.param(*call, id=call[0]) for call in CALLS])
def test_no_tensors(name: str, args: tuple[Any, ...]) -> None:
    """Our own checks raise TypeError, those of torch's dispatcher RuntimeError."""
    for key, arguments in calls_with(name, args, NO_TENSORS):
        with pytest.raises((TypeError, RuntimeError), match=rf"{key} must be a tensor|Expected .*'{key}'"):
            getattr(ops, name)(**arguments)


def test_the_first_row_of_a_prompt_is_not_negative() -> None:
    with ops.prompt_rows(7):
        with pytest.raises(RuntimeError, match="set_first_prompt_row: value must be at least 0, got -1"):
            torch.ops.fastinfer.set_first_prompt_row(-1)
        assert torch.ops.fastinfer.set_first_prompt_row(7) == 7


@pytest.mark.parametrize(("name", "args"), [pytest.param(*call, id=call[0]) for call in CALLS])
def test_odd_tensors(name: str, args: tuple[Any, ...]) -> None:
    """Some operators take some of them, none crashes; the message of torch cannot print so large an integer."""
    for _, arguments in calls_with(name, args, [*ODD_TENSORS, 10**5000]):
        with contextlib.suppress(TypeError, ValueError, RuntimeError):
            getattr(ops, name)(**arguments)


def with_gaps(tensor: Tensor) -> Tensor:
    """The same values, with another number behind each."""
    wide = torch.full((*tensor.shape, 2), 7, device=tensor.device).to(tensor.dtype)
    wide[..., 0] = tensor
    return wide[..., 0]


def tensors_of(values: Any) -> list[Tensor]:
    return [value for value in (values if isinstance(values, tuple) else (values,)) if isinstance(value, Tensor)]


@every_call
def test_tensors_with_gaps(name: str, args: tuple[Any, ...]) -> None:
    """Each is refused by its name, or gives what one without gaps gives."""
    operator, plain = getattr(torch.ops.fastinfer, name).default, copy.deepcopy(args)
    expected = (*tensors_of(operator(*plain)), *tensors_of(plain))
    for place, key in enumerate(named(name, args)):
        if not isinstance(args[place], Tensor) or args[place].numel() < 2:
            continue
        given = copy.deepcopy(args)
        given = (*given[:place], with_gaps(given[place]), *given[place + 1 :])
        refusal = ""
        try:
            out = operator(*given)
        except RuntimeError as error:
            refusal = str(error)
        if refusal:
            assert f"{name}: {key} must " in refusal
            continue
        for got, want in zip((*tensors_of(out), *tensors_of(given)), expected, strict=True):
            assert_bitwise(got.contiguous(), want)


@every_call
def test_tensors_of_another_dtype(name: str, args: tuple[Any, ...]) -> None:
    """Each is refused by its name; beside a cache of another dtype, the other cache or the scales do not fit either."""
    for place, key in enumerate(named(name, args)):
        if isinstance(args[place], Tensor):
            given, refused = copy.deepcopy(args), f"({key}|v_cache|[kv]_scale|scale)" if key.endswith("cache") else key
            with pytest.raises(RuntimeError, match=f"{name}: {refused} must "):
                getattr(torch.ops.fastinfer, name).default(*given[:place], given[place].double(), *given[place + 1 :])


@pytest.mark.parametrize(("name", "args"), [pytest.param(*call, id=call[0]) for call in CALLS])
def test_none(name: str, args: tuple[Any, ...]) -> None:
    """Torch passes it on as a tensor that is undefined, which the operator refuses, unless our own checks do."""
    schema = getattr(torch.ops.fastinfer, name).default._schema
    required = {argument.name for argument in schema.arguments if not isinstance(argument.type, torch.OptionalType)}
    for key, arguments in calls_with(name, args, [None]):
        if key in required:
            with pytest.raises((TypeError, RuntimeError)) as caught:
                getattr(ops, name)(**arguments)
            assert caught.type is not TypeError or f"{key} must be a tensor, got None" in str(caught.value)


def test_functions_in_plain_torch() -> None:
    for value in [*NO_TENSORS, None]:
        with pytest.raises(TypeError, match=r"fastinfer.ops.pack_scales: scales must be a tensor, got "):
            ops.pack_scales(value)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"fastinfer.ops.interleave_gate_up: up must be a tensor, got "):
            ops.interleave_gate_up(torch.ones(16, 2), value)  # type: ignore[arg-type]
        if value is not None:
            with pytest.raises(TypeError, match=r"fastinfer.ops.pack_scales: out must be a tensor, got "):
                ops.pack_scales(torch.ones(16, 2), out=value)  # type: ignore[call-overload]
            with pytest.raises(TypeError, match=r"fastinfer.ops.cos_sin_cache: frequency_factors must be a tensor"):
                ops.cos_sin_cache(4, 10, frequency_factors=value)  # type: ignore[arg-type]
    for number in (10**5000, -(10**5000), None, float("inf"), "x"):
        with pytest.raises(ValueError, match="base must be a finite number above 1, got "):
            ops.cos_sin_cache(4, 10, number)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="rotary_dim must be a positive even number, got "):
            ops.cos_sin_cache(number, 10)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must have rows, got scalars"):
        ops.interleave_gate_up(torch.tensor(1), torch.tensor(1))
