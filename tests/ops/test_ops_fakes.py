"""Fakes are exact: shape, dtype, stride and device of every result are those of the real call."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.op_calls import int32, named, op_calls
from support.quantized_gemm import random_weight
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._pytree import tree_leaves, tree_map

from fastinfer import ops


def strided(*shape: int) -> Tensor:
    """A view whose rows are twice as far apart as they are long."""
    return torch.randn(shape[0], 2 * shape[1], *shape[2:])[:, : shape[1]]


def row_calls(tokens: int) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Operators whose rows may be strided, on views."""
    x, k_cache = strided(tokens, 64), torch.randn(7, 16, 2, 64)
    for activation in (None, "silu"):
        yield "gemm", (x, torch.randn(96, 64), None, None, 1e-6, activation, None)
        for bits in (8, 4):
            weight = random_weight(bits, 96, 64).packed.values()
            yield f"int{bits}_gemm", (x, *weight, None, None, 1e-6, activation, None, 32)
        weight = random_weight(4, 96, 64, mins=False).packed
        call = (x, weight["qweight"], weight["scales"], torch.randn(16), 96)
        yield "lut_gemm", (*call, None, None, 1e-6, activation, None, 32)
    routing = ops.route_experts(strided(tokens, 6), 2, True)
    yield "route_experts", (strided(tokens, 6), 2, True)
    yield "grouped_gemm", (x, torch.randn(6, 96, 64), routing.row_ids, routing.expert_start, None, None)
    yield "permute_columns", (x, torch.randperm(64))
    ragged = (torch.zeros(1, 7, dtype=torch.int32), int32(tokens), int32(0, tokens))
    options = (0.125, 0, 0.0, None, None, None, None, None)
    yield "paged_attention", (strided(tokens, 4, 64), k_cache, k_cache, *ragged, *options)
    rows = torch.randn(7, 16, 1, 64)
    yield "paged_attention", (strided(tokens, 4, 64), rows, rows[..., :48], *ragged, *options)
    yield "paged_attention_plan", (*ragged[1:], 4, 2, 64, 0)


def contiguous_calls(x: Tensor) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Operators with contiguous arguments; of those are one row of a wider tensor, whose stride is the wider one's."""
    one = torch.ones(64)
    yield "rms_norm", (x, one, 1e-6)
    yield "rms_norm", (x, one, 1e-6, x)
    yield "add_rms_norm", (x, x.clone(), one, 1e-6)
    yield "rms_norm_quantize", (x, None, one, 1e-6)
    yield "layer_norm", (x, one, one, 1e-5)
    yield "quantize_int8", (x,)
    yield "silu_and_mul", (x,)
    yield "gelu_and_mul", (x, "tanh")
    yield "gelu", (x, "none")
    if x.dim() == 2:
        ids = torch.zeros(len(x), dtype=torch.int64)
        yield "embedding", (torch.randn(5, 64), ids, x)
        yield "combine_experts", (x, torch.rand(len(x), 1), x)
        yield "int8_pack", (x.to(torch.int8),) if len(x) else (torch.zeros(3, 64, dtype=torch.int8),)
        for bits in (8, 6):
            weight = random_weight(bits, 17, 256 if bits == 6 else 64).packed
            yield f"int{bits}_dequantize", (*weight.values(), ids, torch.bfloat16)
    else:
        lse = torch.randn(x.shape[:2])
        yield "merge_attention_states", (x, lse, x, lse)


def calls() -> Iterator[tuple[str, tuple[Any, ...]]]:
    torch.manual_seed(0)
    yield from op_calls()
    for tokens in (0, 1, 3):
        yield from row_calls(tokens)
        yield from contiguous_calls(torch.randn(tokens, 64))
        yield from contiguous_calls(torch.randn(tokens, 3, 64))
    yield from contiguous_calls(strided(1, 64))
    yield from contiguous_calls(strided(1, 1, 64))


def described(values: Any) -> list[tuple[Any, ...]]:
    tensors = [value for value in tree_leaves(values) if isinstance(value, Tensor)]
    return [(tuple(t.shape), t.stride(), t.dtype, t.device) for t in tensors]


@pytest.mark.parametrize(("name", "args"), [pytest.param(*call, id=f"{call[0]}-{i}") for i, call in enumerate(calls())])
def test_fake_equals_real(name: str, args: tuple[Any, ...]) -> None:
    operator = getattr(torch.ops.fastinfer, name).default
    mode = FakeTensorMode()
    fakes = tree_map(lambda value: mode.from_tensor(value) if isinstance(value, Tensor) else value, args)
    with mode:
        fake = operator(*fakes)
    assert described(fake) == described(operator(*args))


ONE_EACH = [pytest.param(*call, id=call[0]) for call in {name: (name, args) for name, args in op_calls()}.values()]


def on_meta(args: tuple[Any, ...], there: set[int]) -> list[Any]:
    """The arguments with those of these places on ``meta``."""
    return [value.to("meta") if place in there else value for place, value in enumerate(args)]


@pytest.mark.parametrize(("name", "args"), ONE_EACH)
def test_one_tensor_on_meta_is_refused(name: str, args: tuple[Any, ...]) -> None:
    """Such as a weight that was not loaded. Beside a group of ranks, which is in host memory, all others may be."""
    packet = getattr(torch.ops.fastinfer, name)
    tensors = {key: place for place, (key, value) in enumerate(named(name, args).items()) if isinstance(value, Tensor)}
    result = packet.default(*copy.deepcopy(args)) if "out" in packet.overloads() else None
    message = f"{name}: .* must be on the device of the other arguments, (cpu, got meta|meta, got cpu)"
    for key, place in tensors.items():
        if tensors.keys() - {key, "group"}:
            with pytest.raises(RuntimeError, match=message):
                packet.default(*on_meta(args, {place}))
        if result is not None:
            with pytest.raises(RuntimeError, match=message):
                packet.out(*on_meta(args, {place}), out=result)
    if result is not None:
        with pytest.raises(RuntimeError, match=message):
            packet.out(*args, out=result.to("meta"))


def test_the_message_names_the_argument() -> None:
    with pytest.raises(RuntimeError, match="gemm: weight must be on the device of the other arguments, cpu, got meta"):
        ops.gemm(torch.ones(1, 64), torch.empty(32, 64, device="meta"))


@pytest.mark.parametrize(("name", "args"), ONE_EACH)
def test_all_tensors_on_meta(name: str, args: tuple[Any, ...]) -> None:
    packet = getattr(torch.ops.fastinfer, name)
    places = {place for place, value in enumerate(args) if isinstance(value, Tensor)}
    results = packet.default(*on_meta(args, places))
    expected = [(*shape, torch.device("meta")) for *shape, _ in described(packet.default(*copy.deepcopy(args)))]
    assert described(results) == expected


def test_a_group_in_host_memory() -> None:
    """The ranks on GPUs have the table of their addresses there, and trace with it."""
    group, mode = torch.zeros(64, dtype=torch.uint8), FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        x = torch.empty(5, 48, device="cuda")
        assert torch.ops.fastinfer.all_reduce(x, mode.from_tensor(group), 0).device.type == "cuda"
        with pytest.raises(RuntimeError, match=r"all_reduce: group must be .* cuda:0, got meta"):
            torch.ops.fastinfer.all_reduce(x, torch.empty(64, dtype=torch.uint8, device="meta"), 0)


@pytest.mark.parametrize(("name", "args"), ONE_EACH)
def test_symbolic_rows_stay_symbolic(name: str, args: tuple[Any, ...]) -> None:
    """No function and no fake fixes the size of a tensor's first dimension, such as the number of tokens."""
    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes)

    def symbolic(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        sizes = [DimDynamic.DYNAMIC if place == 0 else DimDynamic.STATIC for place in range(value.dim())]
        return mode.from_tensor(value, symbolic_context=StatelessSymbolicContext(sizes))

    call = {key: symbolic(value) for key, value in named(name, args).items()}
    with mode:
        getattr(ops, name)(**call)
    assert not [symbol for symbol, size in shapes.replacements.items() if size.is_number]
