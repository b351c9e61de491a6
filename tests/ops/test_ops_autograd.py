"""Operators have no gradient: activations that want one are refused, weights that are Parameters are not."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.op_calls import named, op_calls
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fastinfer import ops

torch.manual_seed(0)
ALL_CALLS = list(op_calls())
CALLS = dict(ALL_CALLS)  # the last call of each operator

# What a model computes, and what it has; of add_lora a and b are the latter.
ACTIVATIONS = {"x", "residual", "q", "k", "v", "logits", "y", "x_scales", "merge_attention_states.a"}
ACTIVATIONS |= {"q_latent", "q_rope", "kv"}
ACTIVATIONS |= {"merge_attention_states.b", "gate", "qkv", "z", "gated_delta_rule.a", "gated_delta_rule.b"}
ACTIVATIONS |= {"gates", "xbc", "dt", "k_cache", "v_cache", "cache", "lse", "a_lse", "b_lse", "expert_weights"}
ACTIVATIONS |= {"conv_state", "recurrent_state", "ssm_state", "codes"}
ACTIVATIONS |= {"select_tokens.weights", "select_tokens.keys"}
WEIGHTS = {"weight", "scales", "mins", "bias", "norm_weight", "q_norm_weight", "k_norm_weight", "table", "sinks"}
WEIGHTS |= {"add_lora.a", "add_lora.b", "a_log", "dt_bias", "d"}
OTHERS = {"cos_sin_cache", "k_scale", "v_scale", "query_scales", "scale"}
OTHERS |= {"temperature", "top_p", "min_p", "penalties", "bias_values"}


def floats(name: str, kinds: set[str]) -> list[str]:
    """The floating-point arguments of these kinds that any of the operator's calls has."""
    found = {}
    for operator, args in ALL_CALLS:
        for key, value in named(operator, args).items():
            if operator == name and isinstance(value, Tensor) and value.is_floating_point():
                found[key] = kinds & {key, f"{name}.{key}"}
    return [key for key, kind in found.items() if kind]


def call_with(name: str, argument: str) -> dict[str, Any]:
    """A call of the operator that has the argument."""
    calls = (named(operator, copy.deepcopy(args)) for operator, args in ALL_CALLS if operator == name)
    return next(call for call in calls if call.get(argument) is not None and call[argument].is_floating_point())


def test_every_argument_has_a_kind() -> None:
    """A new operator's must be told apart as well."""
    for name in CALLS:
        assert floats(name, ACTIVATIONS | WEIGHTS | OTHERS) == floats(name, set(named(name, CALLS[name])))


def test_every_function_is_an_operator() -> None:
    functions = {name for name in ops.__all__ if not isinstance(getattr(ops, name), type)}
    packing = {"interleave_gate_up", "pack_scales", "pack_two_level_scales"}
    settings = {"batch_invariant", "constant_weights", "prompt_rows", "prompt_rows_of_experts"}
    helpers = {"cos_sin_cache", "supported"} | settings | packing
    assert functions - helpers == CALLS.keys()


@pytest.mark.parametrize(("name", "argument"), [(name, key) for name in CALLS for key in floats(name, ACTIVATIONS)])
def test_activations_that_require_grad_are_refused(name: str, argument: str) -> None:
    call = call_with(name, argument)
    call[argument] = call[argument].requires_grad_()
    function: Callable[..., Any] = getattr(ops, name)
    message = f"fastinfer.ops.{name} is an inference kernel without a gradient, and {argument} requires grad: "
    with pytest.raises(RuntimeError, match=message + r"call it under torch.inference_mode\(\)"):
        function(**call)
    with torch.no_grad():
        function(**call)
    function(**call | {argument: call[argument].detach()})


@pytest.mark.parametrize("name", [name for name in CALLS if floats(name, WEIGHTS)])
def test_weights_may_be_parameters(name: str) -> None:
    """Without no_grad; and the result does not claim a gradient, which backward would miss."""
    call = named(name, copy.deepcopy(CALLS[name]))
    for key in floats(name, WEIGHTS):
        call[key] = torch.nn.Parameter(call[key]) if call[key] is not None else None
    result = getattr(ops, name)(**call)
    tensors = [value for value in tree_leaves(result) if isinstance(value, Tensor)]
    assert not any(tensor.requires_grad for tensor in tensors)


def test_out_that_requires_grad_is_refused() -> None:
    x = torch.ones(2, 4)
    with pytest.raises(RuntimeError, match=r"ops\.gelu is .* and out requires grad: "):
        ops.gelu(x, out=torch.empty(2, 4, requires_grad=True))


def test_compiled() -> None:
    """The check is traced: weights outside of no_grad compile, activations raise."""
    compiled = torch.compile(lambda x, weight: ops.rms_norm(x, weight), fullgraph=True, backend="aot_eager")
    x, weight = torch.randn(3, 64), torch.nn.Parameter(torch.ones(64))
    result = compiled(x, weight)
    assert not result.requires_grad
    torch.testing.assert_close(result, ops.rms_norm(x, weight), rtol=0, atol=0)
    with pytest.raises(Exception, match="an inference kernel without a gradient"):
        compiled(x.requires_grad_(), weight)
