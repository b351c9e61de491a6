"""``out=``: the caller's tensor holds bitwise what a new one would, or is refused where it does not fit."""

from typing import Any

import pytest
import torch
from support.helpers import assert_bitwise, device_fixture, needs_inductor
from support.op_calls import named, out_calls, poison
from torch import Tensor
from torch.utils._pytree import tree_map

from fastinfer import ops
from fastinfer.ops import support

device = device_fixture("cpu", "cuda", "emulated")

torch.manual_seed(0)
CALLS = [(name, named(name, args), out) for name, args, out in out_calls()]
CPU_ALONE = {name for name, takes in support.TABLE.items() if not takes["cuda"].dtype}
# On a GPU these want another group, see test_peer_exchange.py.
CPU_ALONE |= {"all_gather", "all_gather_rows", "all_reduce", "all_reduce_add_rms_norm"}
FIRST = {name: (args, out) for name, args, out in reversed(CALLS)}


def on(device: str, values: Any) -> Any:
    """Copies of all tensors."""
    return tree_map(lambda value: value.to(device, copy=True) if isinstance(value, Tensor) else value, values)


def expected(name: str, args: dict[str, Any]) -> Tensor:
    """The call's result, where the device's kernel takes these arguments: a GPU's want 16-bit activations."""
    try:
        return getattr(ops, name)(**args)
    except RuntimeError as error:
        if any(text in str(error) for text in ("on a GPU", "on CUDA", "weight must be bfloat16")):
            pytest.skip(str(error).splitlines()[0])
        raise


@pytest.fixture(autouse=True)
def _skip_without_kernel(request: pytest.FixtureRequest) -> None:
    params = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    name = CALLS[params["index"]][0] if "index" in params else params.get("name")
    if name in CPU_ALONE and params.get("device", "cpu") != "cpu":
        pytest.skip("not on a GPU")


@pytest.mark.parametrize("index", range(len(CALLS)), ids=lambda index: f"{CALLS[index][0]}-{index}")
def test_result_is_in_out(index: int, device: str) -> None:
    name, args, out = on(device, CALLS[index])
    ours = on(device, args)
    want = expected(name, args)
    address = out.data_ptr()
    result = getattr(ops, name)(**ours, out=out)
    assert result is out
    assert result.data_ptr() == address
    assert_bitwise(result, want)
    for key, value in args.items():  # those changed in place too
        if isinstance(value, Tensor):
            assert_bitwise(ours[key], value)


BAD = {
    "shape": (lambda out: torch.cat([out, out]), r"have the shape \[.*\], got \["),
    "dtype": (lambda out: out.double(), r"be (torch\.)?\w+, got (torch\.)?float64"),
    "strides": (lambda out: out.repeat_interleave(2, -1)[..., ::2], r"be contiguous, got strides \["),
    "device": (lambda out: out.to("meta"), "be on the device of the other arguments, cpu, got meta"),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("name", FIRST)
def test_what_does_not_fit_is_refused(name: str, bad: str) -> None:
    args, out = on("cpu", FIRST[name])
    change, message = BAD[bad]
    with pytest.raises(RuntimeError, match=f"^{name}: out must {message}"):
        getattr(ops, name)(**args, out=change(out))


REPLACEABLE = {
    "rms_norm": {"x", "residual"},
    "add_rms_norm": {"x"},
    "layer_norm": {"x"},
    "gelu": {"x"},
    "relu2": {"x"},
    "xielu": {"x"},
    "embedding": {"residual"},
    "gemm": {"residual"},
    "int8_gemm": {"residual"},
    "int6_gemm": {"residual"},
    "int5_gemm": {"residual"},
    "int4_gemm": {"residual"},
    "lut_gemm": {"residual"},
    "w8a8_gemm": {"residual"},
    "combine_experts": {"residual"},
}
INPLACE = [
    (index, argument)
    for index, (name, args, _) in enumerate(CALLS)
    for argument in sorted(REPLACEABLE.get(name, ()))
    if args.get(argument) is not None
]


@pytest.mark.parametrize(("index", "argument"), INPLACE, ids=[f"{CALLS[i][0]}-{i}-{arg}" for i, arg in INPLACE])
def test_result_may_replace_an_input(index: int, argument: str, device: str) -> None:
    name, args, _ = on(device, CALLS[index])
    ours = on(device, args)
    want = expected(name, args)
    result = getattr(ops, name)(**ours, out=ours[argument])
    assert result is ours[argument]
    assert_bitwise(result, want)


def test_every_replaceable_argument_is_replaced() -> None:
    replaced = {(CALLS[index][0], argument) for index, argument in INPLACE}
    assert replaced == {(name, argument) for name, arguments in REPLACEABLE.items() for argument in arguments}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_results_may_replace_an_input(dtype: torch.dtype, device: str) -> None:
    """Rows longer than a block of threads holds; many tiles, whose sums are split."""
    x, weight = torch.randn(9, 9001, device=device).to(dtype), torch.randn(9001, device=device)
    for run in (ops.rms_norm, lambda x, weight, out=None: ops.layer_norm(x, weight, weight, out=out)):
        ours = x.clone()
        assert_bitwise(run(ours, weight, out=ours), run(x, weight))
    weight = torch.randn(200, 1024, device=device).to(dtype)
    for tokens in (1, 33):
        x, residual = torch.randn(tokens, 1224, device=device).to(dtype).split([1024, 200], 1)
        args = {"x": x, "weight": weight, "residual": residual.contiguous()}
        want = expected("gemm", args)
        assert_bitwise(ops.gemm(**args, out=args["residual"]), want)


def test_other_overlaps_are_refused() -> None:
    memory, weight = torch.randn(8 * 64), torch.randn(64, 64)
    x, shifted = memory[:192].view(3, 64), memory[64:256].view(3, 64)
    message = "out must be apart from argument {}, got one that overlaps it"
    either = message.replace("{}", "{} or that tensor itself")
    with pytest.raises(RuntimeError, match="^gelu: " + either.format(1)):
        ops.gelu(x, out=shifted)
    with pytest.raises(RuntimeError, match="^rms_norm: " + either.format(4)):
        ops.rms_norm(torch.randn(3, 64), torch.ones(64), residual=x, out=shifted)
    with pytest.raises(RuntimeError, match="^rms_norm: " + message.format(2)):
        ops.rms_norm(torch.randn(3, 64), memory[100:164], out=x)
    with pytest.raises(RuntimeError, match="^gemm: " + message.format(1)):
        ops.gemm(x, weight, residual=x, out=x)  # as the residual it could be replaced
    with pytest.raises(RuntimeError, match="^add_rms_norm: " + message.format(2)):
        ops.add_rms_norm(torch.randn(3, 64), x, torch.ones(64), out=x)
    with pytest.raises(RuntimeError, match="^silu_and_mul: " + message.format(1)):
        ops.silu_and_mul(x, out=memory[96:192].view(3, 32))


def test_neighbours_in_memory_do_not_overlap() -> None:
    memory = torch.randn(1, 256)
    x, out = memory[:, :64], memory[:, 64:128]  # of one row, with the stride of the wide one
    want = ops.gelu(x.clone())
    assert_bitwise(ops.gelu(x, out=out), want)
    memory = torch.randn(6, 64)
    want = ops.gelu(memory[:3].clone())
    assert_bitwise(ops.gelu(memory[:3], out=memory[3:]), want)


@pytest.mark.parametrize("name", FIRST)
def test_out_in_the_middle_of_memory(name: str, device: str, request: pytest.FixtureRequest) -> None:
    """Nothing beside it is written, at addresses that are no multiple of a vector."""
    args, out = on(device, FIRST[name])
    want = expected(name, on(device, args))
    memory = out.new_full((out.numel() + 10,), poison(out))
    view = memory[5:-5].view(out.shape)
    aligned = name in ("paged_attention", "int4_pack", "int8_pack")
    if aligned and request.node.callspec.params["device"] != "cpu":
        with pytest.raises(RuntimeError, match="out must be aligned to 16 bytes"):
            getattr(ops, name)(**args, out=view)
        return
    getattr(ops, name)(**args, out=view)
    # A GPU reads and adds up what is not aligned in another order.
    torch.testing.assert_close(view, want)
    for beside in (memory[:5], memory[-5:]):
        assert_bitwise(beside, torch.full_like(beside, poison(out)))


def test_recorded() -> None:
    x, weight, out = torch.randn(3, 64), torch.randn(64, 64) / 8, torch.empty(3, 64)
    graph = ops.CPUGraph()
    with graph.capture():
        ops.gelu(ops.gemm(x, weight, out=out), out=out)
        y = ops.gemm(out, weight, residual=x)
    x.normal_()
    graph.replay()
    assert_bitwise(out, ops.gelu(ops.gemm(x, weight)))
    assert_bitwise(y, ops.gemm(out, weight, residual=x))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=needs_inductor)])
def test_compiled(backend: str) -> None:
    """Results in a tensor from outside, in place of the residual, of x, and of a result; 4 s with Inductor."""

    def run(x: Tensor, weight: Tensor, norm: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        hidden = ops.gemm(x, weight, norm_weight=norm, out=out[1:])
        x = ops.gemm(hidden, weight, residual=x, out=x)
        ops.rms_norm(x, norm, out=x)
        return ops.gelu(hidden, out=hidden) + 1, x

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend=backend)
    for tokens in (5, 9):
        args = torch.randn(tokens, 64), torch.randn(64, 64) / 8, torch.randn(64), torch.zeros(tokens + 1, 64)
        ours = on("cpu", args)
        results, wanted = compiled(*ours), run(*args)
        for got, want in zip((*results, *ours), (*wanted, *args), strict=True):
            assert_bitwise(got, want)


def test_compiled_refuses_what_does_not_fit() -> None:
    compiled = torch.compile(lambda x, out: ops.gelu(x, out=out), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"gelu: out must have the shape \[2, 8\], got \[3, 8\]"):
        compiled(torch.ones(2, 8), torch.ones(3, 8))


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_without_autograd(mode: Any) -> None:
    with mode():
        x = torch.randn(2, 8)
        out = torch.empty_like(x)
        assert_bitwise(ops.gelu(x, out=out), ops.gelu(x))
