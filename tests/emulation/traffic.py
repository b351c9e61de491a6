"""What the CUDA kernels' memory accesses cost, counted on the emulator: ``python tests/emulation/traffic.py``.

Prints, for every place in the kernels of a model's step, how many requests its warps make and what one takes: passes
through shared memory (more than the least are bank conflicts) or 32-byte sectors of global memory. traffic.cpp says how
it is counted.
"""

import ctypes
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from support.quantized_gemm import random_weight

from emulation import build
from fastinfer import ops

# Their accesses count where they are called.
WRAPPERS = (
    "tests/emulation/common/",
    "tests/emulation/cuda_runtime.h",
    "tests/emulation/block",
    "tests/emulation/emulator",
    "csrc/common/cuda/",
    "csrc/common/cuda/row.h",
)
ROOT = Path(__file__).parent.parent.parent


KINDS = ("load", "store", "atomic")


@dataclass
class Access:
    """A kernel's accesses of one kind at one line."""

    kernel: str
    file: str
    line: str
    function: str  # that the line is in
    wrapper: str  # that it calls for the access, or nothing
    shared: bool
    kind: str
    bytes: int  # of a lane
    requests: int = 0
    units: int = 0  # passes or sectors
    least: int = 0  # that the same bytes need

    @property
    def space(self) -> str:
        return "shared" if self.shared else "global"

    @property
    def ratio(self) -> float:
        return self.units / self.least

    def __str__(self) -> str:
        kind = f"{self.space} {self.kind}"
        counts = f"{self.requests:9} {self.units / self.requests:8.2f} {self.ratio:6.2f}"
        place = f"{self.file}:{self.line} {self.function} {self.wrapper}"
        return f"{self.kernel:24} {kind:13} {self.bytes:4} {counts}  {place}"


HEADER = f"{'kernel':24} {'access':13} {'B':>4} {'requests':>9} {'of each':>8} {'ratio':>6}  place"


class Counter:
    """The counts of one library of the traffic build."""

    def __init__(self, library: Path):
        self.library = library
        self.loaded = ctypes.CDLL(str(library))
        self.loaded.emulation_traffic.restype = ctypes.c_char_p
        self._known: dict[str, tuple[str, str]] = {}  # function and file:line of an address

    def accesses(self) -> list[Access]:
        """Since the last call, the dearest of a kernel first; those that hand parameters over are left out."""
        lines = [line.split() for line in self.loaded.emulation_traffic().decode().splitlines()]
        self._look_up({address for line in lines for address in line[7:]} - self._known.keys())
        found: dict[tuple[object, ...], Access] = {}
        for kernel, shared, kind, size, *rest in lines:
            requests, units, least = map(int, rest[:3])
            place = self._place(rest[3:])
            if place is None:
                continue
            key = (kernel, *place, shared == "1", KINDS[int(kind)], int(size))
            access = found.setdefault(key, Access(*key))
            access.requests += requests
            access.units += units
            access.least += least
        return sorted(found.values(), key=lambda access: (access.kernel, -access.units))

    def _look_up(self, addresses: set[str]) -> None:
        ordered = sorted(addresses)
        command = ["addr2line", "-f", "-C", "-e", str(self.library)]
        numbers = "\n".join(hex(int(address)) for address in ordered)
        lines = subprocess.run(command, input=numbers, capture_output=True, text=True, check=True).stdout.splitlines()
        self._known.update(zip(ordered, zip(lines[::2], lines[1::2], strict=True), strict=True))

    def _place(self, addresses: list[str]) -> tuple[str, str, str, str] | None:
        """The innermost place in a kernel; None for the launch, which hands the parameters over, and for the arrival of
        an asynchronous copy, which was counted when it started."""
        frames = [self._known[address] for address in addresses]
        names = [_short_name(function) for function, _ in frames]
        if "cp_async_wait" in names:
            return None
        for name, (_, place) in zip(names, frames, strict=True):
            path, _, line = place.partition(" ")[0].rpartition(":")
            file = os.path.relpath(path or "??", ROOT)  # unknown for the emulator's own
            if file.startswith(("csrc/", "tests/")) and not file.startswith(WRAPPERS):
                return file.removeprefix("csrc/"), line, name, "" if name == names[0] else names[0]
        return None


def _short_name(function: str) -> str:
    """Of a demangled function, without its namespaces, template arguments and parameters."""
    name = function.replace("(anonymous namespace)::", "")
    while (shorter := re.sub(r"<[^<>]*>", "", name)) != name:
        name = shorter
    return name.partition("(")[0].rpartition("::")[2].rpartition(" ")[2]


def operators() -> Counter:
    """Registers ``torch.ops.fastinfer_traffic``."""
    library = build.build("traffic", "fastinfer_emulated") / "libfastinfer_emulated.so"
    torch.ops.load_library(library)
    return Counter(library)


def run(name: str, arguments: tuple[Any, ...]) -> None:
    getattr(torch.ops.fastinfer_traffic, name).default(*arguments)


def calls() -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Operators in shapes of real models, small in what only repeats: names and complete positional arguments."""
    hidden, rows = 256, 256
    weight = torch.randn(rows, hidden).bfloat16()
    packed = {bits: random_weight(bits, rows, hidden).packed for bits in (4, 8)}
    # Groups of 128, which have kernels of their own.
    common = packed[4] | {name: packed[4][name][:, ::4].contiguous() for name in ("scales", "mins")}
    norm, table = torch.ones(hidden), torch.randn(16)
    for tokens in (1, 64, 128):
        x = torch.randn(tokens, hidden).bfloat16()
        for fused in ((None, None, 1e-6, None, torch.randn(tokens, rows).bfloat16()), (None, norm, 1e-6, "silu", None)):
            yield "gemm", (x, weight, *fused)
            yield "int4_gemm", (x, *packed[4].values(), *fused, 32)
            yield "int4_gemm", (x, *common.values(), *fused, 32)
            yield "int8_gemm", (x, *packed[8].values(), *fused, 32)
            yield "lut_gemm", (x, packed[4]["qweight"], packed[4]["scales"], table, rows, *fused, 32)
        q = torch.randint(-127, 128, (tokens, hidden)).to(torch.int8), torch.rand(tokens)
        row_scales = ops.pack_scales(torch.rand(rows, 1))
        for activation in (None, "silu"):
            yield "w8a8_gemm", (*q, packed[8]["qweight"], row_scales, rows, None, activation, None, torch.bfloat16)
    # So wide that no unit is cut.
    x = torch.randn(8, 128).bfloat16()
    yield "int4_gemm", (x, *random_weight(4, 1536, 128).packed.values(), None, None, 1e-6, "silu", None, 32)
    yield from expert_calls()
    for head_dim in (64, 80, 128, 256):
        yield from attention_calls(head_dim)
    x = torch.randn(16, 4096).bfloat16()
    yield "add_rms_norm", (x.clone(), x.clone(), torch.ones(4096).bfloat16(), 1e-6)
    yield "layer_norm", (x, torch.ones(4096), torch.ones(4096), 1e-5)
    yield "quantize_int8", (x,)
    yield "silu_and_mul", (x,)
    matrices, ids = torch.randn(2, 2, 16, 4096).bfloat16().unbind(), torch.arange(16, dtype=torch.int32) // 8
    yield "add_lora", (x.clone(), x, *matrices, ids, None, None, None, 0.0)
    yield "embedding", (x, torch.arange(8))
    yield "relu2", (x,)
    yield "xielu", (x, 0.8, 1.3, 0.5, -1e-6)
    yield "sigmoid_gate", (x, x)
    yield "softcap", (x, 30.0)
    yield "sample", (torch.randn(2, 32_000), *sampling(2), *[None] * 7, 0)
    # Tiles of 256 tokens.
    x = torch.randn(256, 128).bfloat16()
    yield "gemm", (x, torch.randn(768, 128).bfloat16(), None, None, 1e-6, None, None)
    yield "int4_gemm", (x, *random_weight(4, 768, 128).packed.values(), None, None, 1e-6, None, None, 32)
    yield from linear_attention_calls()
    yield from latent_attention_calls()


def expert_calls() -> Iterator[tuple[str, tuple[Any, ...]]]:
    """A mixture of four experts, two for each of 32 tokens."""
    x, logits = torch.randn(32, 256).bfloat16(), torch.randn(32, 4).bfloat16()
    yield "route_experts", (logits, 2, True)
    ids = logits.topk(2)[1].flatten()
    rows = ids.argsort(stable=True).int(), torch.nn.functional.pad(ids.bincount(minlength=4).cumsum(0), (1, 0)).int()
    stack = [random_weight(4, 256, 256).packed for _ in range(4)]
    weights = [torch.stack([weight[name] for weight in stack]) for name in ("qweight", "scales", "mins")]
    yield "grouped_int4_gemm", (x, *weights, 256, *rows, None, "silu", 32)
    yield "combine_experts", (torch.randn(64, 256).bfloat16(), torch.rand(32, 2), x)


def linear_attention_calls() -> Iterator[tuple[str, tuple[Any, ...]]]:
    """A decode of two sequences, and a prompt, of four heads of 128."""
    heads, dim, states = 4, 128, torch.randn(2, 4, 128, 128)
    for slots in (((0, 1, 2), (0, 1), (0, 1)), ((0, 16), (-1,), (*(-1,) * 15, 1))):
        step = [torch.tensor(values, dtype=torch.int32) for values in slots]
        tokens = len(slots[2])
        qkv, z = torch.randn(tokens, 2 * heads * dim).bfloat16(), torch.randn(tokens, heads * dim).bfloat16()
        weight = torch.randn(qkv.shape[1], 4).bfloat16()
        yield "causal_conv1d", (qkv, weight, None, torch.randn(2, 3, qkv.shape[1]).bfloat16(), *step)
        gates = torch.randn(2, tokens, heads).unbind()
        yield "gated_delta_rule", (qkv, z, *gates, *torch.randn(2, heads), torch.ones(dim), 1e-6, states, *step)
        conv = torch.randn(dim, 4).bfloat16(), None, torch.randn(2, 3, dim).bfloat16(), *step
        yield "causal_conv1d", (z[:, :dim].contiguous(), *conv, z[:, dim : 3 * dim].contiguous())
        scan = *torch.randn(3, heads), torch.ones(heads * dim), 1e-6, 0.0, 9.0, states, *step
        yield "mamba2_scan", (qkv[:, : (heads + 2) * dim].contiguous(), z, gates[0], *scan)


def attention_calls(head_dim: int) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """A decode and a prefill over a cache of each kind, and what comes before them."""
    heads, kv_heads, length, block = 8, 2, 256, 16
    blocks = length // block
    tables = torch.randperm(blocks, dtype=torch.int32)[None], torch.tensor([length], dtype=torch.int32)
    floats = [torch.randn(blocks, block, kv_heads, head_dim).bfloat16() for _ in range(2)]
    integers = [torch.randint(-127, 128, cache.shape).to(torch.int8) for cache in floats]
    codes = [torch.randint(0, 256, (*cache.shape[:-1], head_dim // 2)).to(torch.uint8) for cache in floats]
    groups = [torch.rand(blocks, block, kv_heads, count, 2).half() for count in (head_dim // 16, -(-head_dim // 64))]
    scales = [torch.rand(blocks, block, kv_heads) for _ in range(2)]
    for tokens in (1, 32):
        q, k, v = torch.randn(tokens, heads + 2 * kv_heads, head_dim).bfloat16().split([heads, kv_heads, kv_heads], 1)
        ragged = *tables, torch.tensor([0, tokens], dtype=torch.int32)
        for cache in ((*floats, None, None), (*integers, *scales), (*codes, *groups)):
            yield "paged_attention", (q, *cache[:2], *ragged, 0.125, 0, 0.0, None, None, *cache[2:], None)
        positions = torch.arange(tokens)
        rotary = ops.cos_sin_cache(head_dim, length)
        yield "rotary_embedding", (q, k, positions, rotary, False)
        norms = torch.ones(head_dim), torch.ones(head_dim)
        yield "norm_rotary_store", (q, k, v, *norms, 1e-6, positions, rotary, False, *floats, None, None, positions)
        for cache in (floats, (*integers, *scales), (*codes, *groups)):
            yield "store_kv_cache", (k, v, *cache[:2], positions, *cache[2:])


def latent_attention_calls() -> Iterator[tuple[str, tuple[Any, ...]]]:
    """A decode and a prefill of 20 heads over a cache of rows that are keys and values."""
    heads, rank, rotary_dim, length, block = 20, 256, 64, 128, 16
    rows = torch.randn(length // block, block, 1, rank + rotary_dim).bfloat16()
    tables = torch.randperm(length // block, dtype=torch.int32)[None], torch.tensor([length], dtype=torch.int32)
    rotary = ops.cos_sin_cache(rotary_dim, length)
    for tokens in (1, 16):
        positions = torch.arange(tokens)
        yield "head_rows", (positions, heads)
        parts = torch.randn(tokens, heads, rank), torch.randn(tokens, heads, 128 + rotary_dim)[..., 128:]
        x = *(part.bfloat16() for part in parts), torch.randn(tokens, rank + rotary_dim).bfloat16()
        yield "latent_rotary_store", (*x, torch.ones(rank), 1e-6, positions, rotary, True, None, rows, None, positions)
        q, ragged = torch.randn(tokens, heads, rank + rotary_dim).bfloat16(), torch.tensor([0, tokens]).int()
        yield "paged_attention", (q, rows, rows[..., :rank], *tables, ragged, 0.1, 0, 0.0, *[None] * 5)
        index, weights = torch.randn(tokens, 32, 128).bfloat16(), torch.randn(tokens, 32).bfloat16()
        keys = torch.randn(length // block, block, 1, 128).bfloat16()
        yield "select_tokens", (index, weights, keys, *tables, ragged, 40)


def sampling(count: int) -> tuple[torch.Tensor, ...]:
    top_k, numbers = torch.full((count,), 50, dtype=torch.int32), torch.arange(count)
    return torch.ones(count), top_k, torch.full((count,), 0.9), torch.zeros(count), numbers, numbers


def main() -> None:
    counter = operators()
    torch.manual_seed(0)
    for name, arguments in calls():
        run(name, arguments)
    print(HEADER)
    for access in counter.accesses():
        print(access)


if __name__ == "__main__":
    main()
