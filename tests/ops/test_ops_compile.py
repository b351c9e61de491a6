"""The operators as torch sees them: schemas, torch.compile, torch.export, CUDA graphs, inference mode."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.helpers import assert_bitwise, needs_inductor
from support.op_calls import int32, op_calls, out_calls, overload_calls
from support.quantized_gemm import random_weight
from torch import Tensor

from fastinfer import ops


def overload(name: str) -> Any:
    return getattr(torch.ops.fastinfer, name).default


torch.manual_seed(0)
CALLS = [pytest.param(name, args, id=f"{name}-{index}") for index, (name, args) in enumerate(op_calls())]
OUT_CALLS = {f"{name}.out": (args, out) for name, args, out in out_calls()}
OVERLOAD_CALLS = {f"{name}.{overload}": args for name, overload, args in overload_calls()}


def test_every_operator_is_called() -> None:
    schemas = [schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("fastinfer::")]
    registered = {f"{schema.name}.{schema.overload_name}".removeprefix("fastinfer::").strip(".") for schema in schemas}
    settings = {"set_batch_invariant", "set_constant_weights", "set_dependent_launches", "set_first_prompt_row"}
    assert registered == {name for name, _ in op_calls()} | OUT_CALLS.keys() | OVERLOAD_CALLS.keys() | settings


UTILITIES = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.mark.parametrize(("name", "args"), CALLS)
def test_opcheck(name: str, args: tuple[Any, ...]) -> None:
    torch.library.opcheck(overload(name), args, test_utils=UTILITIES)


@pytest.mark.parametrize("name", OUT_CALLS)
def test_opcheck_of_out(name: str) -> None:
    args, out = OUT_CALLS[name]
    packet = getattr(torch.ops.fastinfer, name.removesuffix(".out"))
    torch.library.opcheck(packet.out, args, {"out": out}, test_utils=UTILITIES)


@pytest.mark.parametrize("name", OVERLOAD_CALLS)
def test_opcheck_of_other_overloads(name: str) -> None:
    operator, chosen = name.split(".")
    packet = getattr(torch.ops.fastinfer, operator)
    torch.library.opcheck(getattr(packet, chosen), OVERLOAD_CALLS[name], test_utils=UTILITIES)


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


Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


def inputs(tokens: int) -> Inputs:
    torch.manual_seed(tokens)
    k_cache, v_cache = torch.zeros(2, 4, 16, KV_HEADS, HEAD_DIM).unbind(0)
    return torch.randn(tokens, HIDDEN), torch.arange(tokens), k_cache, v_cache


def assert_equals_eager(run: Callable[..., Any], block: Block, sizes: tuple[int, ...]) -> None:
    for tokens in sizes:
        ours, plain = inputs(tokens), inputs(tokens)
        assert_same((*run(*ours), *ours), (*block(*plain), *plain))


@pytest.fixture(scope="module")
def block() -> Block:
    torch.manual_seed(0)
    return Block()


def test_compiled_block_equals_eager(block: Block) -> None:
    """One graph, no break; views changed in place (rotary on slices of qkv) and the sum in add_rms_norm survive it."""
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch.inference_mode():
        assert_equals_eager(compiled, block, (5, 9))


@pytest.mark.slow
@needs_inductor
def test_inductor_block_equals_eager(block: Block) -> None:
    """The backend that generates code and puts operators in place; 20 s, most of them g++."""
    compiled = torch.compile(block, fullgraph=True)
    example = inputs(5)
    for tensor in example[:2]:
        torch._dynamo.mark_dynamic(tensor, 0)
    with torch.inference_mode():
        compiled(*example)
        assert_equals_eager(compiled, block, (5, 9))


@pytest.mark.parametrize("strict", [False, True])
def test_exported_block_equals_eager(block: Block, strict: bool) -> None:
    tokens = torch.export.Dim("tokens", min=2, max=60)
    shapes = ({0: tokens}, {0: tokens}, None, None)
    exported = torch.export.export(block, inputs(5), dynamic_shapes=shapes, strict=strict)
    assert_equals_eager(exported.module(), block, (5, 9, 2))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_graph() -> None:
    """Captured once, replayed on other contents; not yet run on a GPU."""
    weight = ops.int4_pack(torch.randint(0, 16, (384, 256), device="cuda").byte())
    scales = ops.pack_scales(torch.rand(384, 8, device="cuda") / 64)
    norm, cache = torch.rand(256, device="cuda"), torch.randn(2, 4, 16, 2, 64, device="cuda").bfloat16()
    table, lens, start = (t.cuda() for t in (int32(2, 0, 1)[None], int32(40), int32(0, 5)))

    def run(x: Tensor, out: Tensor) -> Tensor:
        qkv = ops.int4_gemm(ops.rms_norm(x, norm), weight, scales, None, 384)
        return ops.paged_attention(qkv.view(5, 6, 64)[:, :4], *cache, table, lens, start, out=out)

    x, out = torch.randn(5, 256, device="cuda").bfloat16(), torch.empty(5, 4, 64, device="cuda").bfloat16()
    run(x, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(x, out)
    x.copy_(torch.randn(5, 256, device="cuda"))
    graph.replay()
    torch.cuda.synchronize()
    assert_bitwise(out, run(x, torch.empty_like(out)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("warm", [True, False])
def test_cuda_graph_trees(warm: bool) -> None:
    """torch's graphs refuse memory in their pool that is neither input nor output; not yet run on a GPU.

    The counters of a product that is cut are such memory, whether they exist before the first call or not.
    """
    weight = ops.int4_pack(torch.randint(0, 16, (384, 4096), device="cuda").byte())
    scales = ops.pack_scales(torch.rand(384, 128, device="cuda") / 64)

    def run(x: Tensor) -> Tensor:
        return ops.int4_gemm(x, weight, scales, None, 384)

    inputs = [torch.randn(5, 4096, device="cuda").bfloat16() for _ in range(4)]
    if warm:
        run(inputs[0])
    compiled = torch.compile(run, mode="reduce-overhead")
    results = [compiled(x).clone() for x in inputs]
    for result, x in zip(results, inputs, strict=True):
        assert_bitwise(result, run(x))
