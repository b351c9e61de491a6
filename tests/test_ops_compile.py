"""The operators as torch sees them: schemas, fakes, torch.compile, inference mode."""

import copy
from typing import Any

import pytest
import torch
from helpers import assert_bitwise
from op_calls import int32, op_calls
from quantized_gemm import random_weight
from torch import Tensor

from fastinfer import ops


def overload(name: str) -> Any:
    return getattr(torch.ops.fastinfer, name).default


torch.manual_seed(0)
CALLS = [pytest.param(name, args, id=f"{name}-{index}") for index, (name, args) in enumerate(op_calls())]


def test_every_operator_is_called() -> None:
    schemas = [schema.name for schema in torch._C._jit_get_all_schemas()]
    registered = {name.removeprefix("fastinfer::") for name in schemas if name.startswith("fastinfer::")}
    assert registered == {name for name, _ in op_calls()}


@pytest.mark.parametrize(("name", "args"), CALLS)
def test_opcheck(name: str, args: tuple[Any, ...]) -> None:
    """No test_autograd_registration: no operator has a gradient, and the arguments ask for none."""
    utilities = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(overload(name), args, test_utils=utilities)


@pytest.mark.parametrize(("name", "args"), CALLS)
def test_inference_mode(name: str, args: tuple[Any, ...]) -> None:
    plain, inference = copy.deepcopy(args), copy.deepcopy(args)
    expected = overload(name)(*plain)
    with torch.inference_mode():
        out = overload(name)(*inference)
    for got, want in zip((out, *inference), (expected, *plain), strict=True):
        assert_same(got, want)


def assert_same(got: Any, want: Any) -> None:
    if isinstance(want, Tensor):
        assert_bitwise(got, want)
    elif isinstance(want, tuple):
        for pair in zip(got, want, strict=True):
            assert_same(*pair)
    else:
        assert got == want


HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32
HIDDEN = HEADS * HEAD_DIM


class Block(torch.nn.Module):
    """A decoder layer and a sampler, built from every operator that a model's forward pass calls."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.randn(HIDDEN)
        self.qkv = torch.randn((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN) / HIDDEN**0.5
        self.output = random_weight(8, HIDDEN, HIDDEN).packed
        self.gate_up = random_weight(4, 4 * HIDDEN, HIDDEN).packed
        self.down = random_weight(4, HIDDEN, 2 * HIDDEN).packed
        self.table = ops.cos_sin_cache(HEAD_DIM, 64)

    def forward(self, x: Tensor, positions: Tensor, k_cache: Tensor, v_cache: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        tokens = x.shape[0]
        qkv = ops.gemm(x, self.qkv, norm_weight=self.norm).view(tokens, -1, HEAD_DIM)
        q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], 1)
        ops.rotary_embedding(q, k, positions, self.table)
        ops.store_kv_cache(k, v, k_cache, v_cache, positions)
        table, lens, start = (t.to(x.device) for t in (int32(0, 1, 2, 3)[None], int32(tokens), int32(0, tokens)))
        attended = ops.paged_attention(q, k_cache, v_cache, table, lens, start).view(tokens, HIDDEN)
        x = ops.int8_gemm(attended, **self.output, residual=x)
        hidden = ops.int4_gemm(x, **self.gate_up, norm_weight=self.norm, activation="silu", activation_bits=8)
        update = ops.int4_gemm(hidden, **self.down)
        normed = ops.add_rms_norm(update, x, self.norm)
        gated = ops.silu_and_mul(normed) + ops.gelu_and_mul(normed)
        logits = ops.rms_norm(gated, self.norm[: HIDDEN // 2])
        one, zero = torch.ones(tokens), torch.zeros(tokens)
        token, logprob, *_ = ops.sample(logits, one, zero.int(), one, zero, positions, positions)
        return x, token, logprob


def test_compiled_block_equals_eager() -> None:
    """One graph, no break; views changed in place (rotary on slices of qkv) and the sum in add_rms_norm survive it."""
    torch.manual_seed(0)
    block = Block()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch.inference_mode():
        for tokens in (5, 9):
            x, positions = torch.randn(tokens, HIDDEN), torch.arange(tokens)
            results = []
            for run in (block, compiled):
                caches = torch.zeros(2, 4, 16, KV_HEADS, HEAD_DIM).unbind(0)
                results.append((*run(x.clone(), positions, *caches), *caches))
            assert_same(results[1], results[0])
