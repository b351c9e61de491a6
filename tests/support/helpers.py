"""What the operators' tests share: devices, tolerances, threads and guarded memory."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from fastinfer import ops
from fastinfer.formats.gguf_rows import GGUFRows
from fastinfer.formats.unpacked import Int4, Int8
from support.emulator import Emulator, order_of
from support.placement import EmulatedDevice, Placement

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Without vector instructions torch 2.13's Inductor generates code that does not compile.
needs_inductor = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="Inductor needs vector instructions"
)


def tested_devices() -> set[str]:
    """Those for which ``device_fixture`` makes cases: others would only be collected, and left out or skipped."""
    if "FASTINFER_EMULATION" in os.environ:
        return {"emulated"}
    if "FASTINFER_SANITIZER" in os.environ:
        return {"cpu"}
    return {"cpu", "avx512", "emulated"} | ({"cuda"} if torch.cuda.is_available() else set())


def device_fixture(*names: str) -> Callable[..., Any]:
    """A ``device`` fixture over the devices that an operator has: cpu, avx512, cuda, emulated.

    There are cases for the ``tested_devices`` among them, and for all where there is none.

    On "emulated" the tensors lie in host memory and ``fastinfer.ops`` calls the CUDA kernels on the emulator
    (tests/emulation), with blocks in an order that the test's name decides, for tensors made on this device; on
    "avx512" it calls the CPU kernels as compiled for AVX-512 BF16, on emulated instructions. The fixture seeds torch,
    so that a test alone sees the same data, and keeps torch on one thread: for the references' small tensors a second
    one costs more than it gives (46 ms instead of 0.1 ms for a product when both cores are busy).
    """
    marks = {
        "cpu": [],
        "avx512": [pytest.mark.avx512],
        "cuda": [pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")],
        "emulated": [pytest.mark.emulated],
    }
    tested = tested_devices()
    cases = [name for name in names if name in tested] or names
    params = [pytest.param(name, marks=marks[name]) for name in cases]

    @pytest.fixture(params=params, name="device")
    def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        torch.manual_seed(0)
        if request.param in ("emulated", "avx512"):
            library = request.getfixturevalue(f"{request.param}_library")
            for name, module in list(sys.modules.items()):
                if name.startswith("fastinfer.ops.") and getattr(module, "ops", None) is torch.ops.fastinfer:
                    monkeypatch.setattr(module, "ops", getattr(torch.ops, f"fastinfer_{request.param}"))
            if request.param == "emulated":
                monkeypatch.setattr(GGUFRows, "pack", pack_by_operators)
                monkeypatch.setattr(GGUFRows, "two_level_bits", 0)
                monkeypatch.setattr(GGUFRows, "has_five_bits", False)
                order = order_of(request.node.nodeid.rpartition("/")[2])
                request.node.add_report_section("call", "emulator", f"FASTINFER_BLOCK_ORDER={order}")
                with Emulator(library).block_order(order), Placement():
                    yield EmulatedDevice("cpu")
            else:
                yield "cpu"
        else:
            yield request.param
        torch.set_num_threads(threads)

    return device


def pack_by_operators(rows: GGUFRows, q: Tensor, scales: Tensor, mins: Tensor | None) -> bool:
    """As for a GPU, whose packed layout is another than the CPU's, for which rows are packed straight from the file."""
    form = rows.unpack()
    assert isinstance(form, Int4 | Int8)
    if form.scales.dtype is torch.float32 and scales.dtype is torch.float16:
        return False
    (ops.int8_pack if isinstance(form, Int8) else ops.int4_pack)(form.q.to(q.device), out=q)
    ops.pack_scales(form.scales.to(scales), out=scales)
    if mins is not None:
        assert form.mins is not None
        ops.pack_scales(form.mins.to(mins), out=mins)
    return True


def assert_rounded(out: Tensor, expected: Tensor, slack: float = 2e-6) -> None:
    """``out`` is the fp64 ``expected`` after fp32 arithmetic and one rounding to its own dtype.

    ``slack`` is what fp32 arithmetic may lose, relative to the element and to the mean magnitude (sums cancel).
    """
    assert out.shape == expected.shape
    if not out.numel():
        return
    info = torch.finfo(out.dtype)
    magnitude = expected.abs()
    bound = 0.5 * info.eps * (magnitude + info.tiny) + slack * (magnitude + magnitude.mean())
    excess = (out.double() - expected).abs() - bound
    worst = int(excess.argmax()) if not excess.isnan().any() else int(excess.isnan().flatten().nonzero()[0])
    assert excess.flatten()[worst] <= 0, (
        f"element {worst} of {tuple(out.shape)}: got {out.flatten()[worst].item()!r}, "
        f"expected {expected.flatten()[worst].item()!r} +- {bound.flatten()[worst].item():.3g}"
    )


def assert_bitwise(out: Tensor, expected: Tensor) -> None:
    """Same dtype, same values (NaN equals NaN), no tolerance."""
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Give new floating-point tensors another dtype, as programs do that build a model in bf16."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def num_threads(count: int) -> Iterator[None]:
    """Run the CPU operators on ``count`` threads."""
    from fastinfer import _C

    before = _C.get_num_threads()
    _C.set_num_threads(count)
    try:
        yield
    finally:
        _C.set_num_threads(before)


def per_thread_count(run: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
    """The result of ``run`` on one thread, and on two."""
    with num_threads(1):
        one = run()
    with num_threads(2):
        two = run()
    return one, two


class Guarded:
    """A strided view in the middle of wider memory, which must stay as it was.

    The last ``len(shape) - 1`` dimensions are contiguous: the view of a slice of a fused projection.
    """

    PAD = 24

    def __init__(self, values: Tensor) -> None:
        rows, width = values.shape[0], values.shape[1:].numel()
        self._memory = torch.full((rows, width + 2 * self.PAD), torch.nan, dtype=values.dtype, device=values.device)
        self.view = self._memory[:, self.PAD : self.PAD + width].unflatten(1, values.shape[1:])
        self.view.copy_(values)

    def assert_intact(self) -> None:
        """Nothing beside the view was written (the margins are NaN, so reading them would have shown too)."""
        assert self._memory[:, : self.PAD].isnan().all()
        assert self._memory[:, -self.PAD :].isnan().all()


class GuardedResult:
    """A contiguous tensor in the middle of longer memory, which must stay as it was, for a result written in place."""

    PAD = 64

    def __init__(self, values: Tensor) -> None:
        self._memory = torch.full((values.numel() + 2 * self.PAD,), 77, dtype=values.dtype)
        self.view = self._memory[self.PAD : -self.PAD].view(values.shape)
        self.view.copy_(values)

    def assert_intact(self) -> None:
        """Nothing beside the view was written."""
        assert (self._memory[: self.PAD] == 77).all()
        assert (self._memory[-self.PAD :] == 77).all()


# Every combination of prologue and epilogue that the linear layers fuse; see gemm_options.
GEMM_FUSIONS = [
    "+".join(filter(None, parts)) or "plain"
    for parts in product(["", "norm"], ["", "bias"], ["", "residual", "silu", "gelu_tanh", "gelu", "clamped_swiglu"])
]


def gemm_options(fusion: str, x: Tensor, out_features: int, vector_dtype: torch.dtype) -> dict[str, Any]:
    """Random arguments for one of GEMM_FUSIONS; ``vector_dtype`` is that of bias and norm weight."""
    options: dict[str, Any] = {}
    for part in fusion.split("+"):
        if part == "norm":
            options |= {"norm_weight": torch.randn(x.shape[1], device=x.device).to(vector_dtype), "eps": 1e-5}
        elif part == "bias":
            options["bias"] = torch.randn(out_features, device=x.device).to(vector_dtype)
        elif part == "residual":
            options["residual"] = torch.randn(x.shape[0], out_features, device=x.device).to(x.dtype)
        elif part != "plain":
            options["activation"] = part
    return options
