"""Ceilings of the machine, and the share of them that the CPU kernels and the whole engine reach.

Ceilings are measured by loops of the active instruction set that do nothing else (csrc/roofline). In every round each
kernel is timed right after its own ceiling, because the machine's speed drifts; shares are medians over these pairs.
The ceiling of decoding is the read bandwidth, that of prefill the rate of byte products.
"""

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fastinfer import _C, LLM, SamplingParams, hub, ops
from fastinfer.benchmarks.report import write_json
from fastinfer.formats.gguf import GGUFFile
from fastinfer.utils.table import format_table

SAMPLE_S = 0.03  # about ten time slices of the operating system's scheduler
GROUP = 32
COLD_BYTES = 192 << 20  # total size of weights that take turns; more than the last-level cache
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


@dataclass(frozen=True)
class Layer:
    """Sizes of the linear layers of a decoder layer."""

    hidden: int
    qkv: int
    intermediate: int

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Sizes (out_features, in_features) of QKV, output, gate and up, down; the query has ``hidden`` elements."""
        hidden, wide = self.hidden, self.intermediate
        return [(self.qkv, hidden), (hidden, hidden), (2 * wide, hidden), (hidden, wide)]


LAYERS = {
    "135M layer": Layer(576, 960, 1536),
    "1.5B layer": Layer(1536, 2048, 8960),
    "8B layer": Layer(4096, 6144, 14336),
}
SMALL_LAYERS = {"small layer": Layer(64, 96, 128)}
TOKENS = (1, 16, 512)


@dataclass
class Ceiling:
    """Resource of the machine, with samples of its rate in bytes or operations per second."""

    resource: str
    threads: int
    memory_bytes: int = 0
    per_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Zeros would all map to one page. torch aligns to cache lines.
        self._memory = torch.ones(self.memory_bytes, dtype=torch.uint8).numpy()
        self._passes = 1
        while self._measure()[1] < SAMPLE_S / 2 and self.exists:
            self._passes *= 2

    @property
    def exists(self) -> bool:
        """Whether this CPU has such an instruction."""
        return self._measure()[0] > 0

    def sample(self) -> float:
        work, seconds = self._measure()
        self.per_s.append(work / seconds)
        return self.per_s[-1]

    def _measure(self) -> tuple[float, float]:
        threads = _C.get_num_threads()
        _C.set_num_threads(self.threads)
        try:
            return _C.roofline(self.resource, self._memory, self._passes)
        finally:
            _C.set_num_threads(threads)


@dataclass
class Kernel:
    """Function that moves bytes or does operations, and the ceiling that it is compared with."""

    run: Callable[[], float]  # seconds of one call
    work: float
    ceiling: Ceiling
    per_s: list[float] = field(default_factory=list)
    share: list[float] = field(default_factory=list)

    def sample(self) -> None:
        ceiling = self.ceiling.sample()
        calls, seconds = 0, 0.0
        while seconds < SAMPLE_S:
            seconds += self.run()
            calls += 1
        self.per_s.append(self.work * calls / seconds)
        self.share.append(self.per_s[-1] / ceiling)


def cache_bytes(level: int) -> int:
    """Return the size of the cache of a level that the first core uses, 0 if the system does not report it."""
    for folder in CACHES.glob("index*"):
        if (folder / "level").read_text().strip() == str(level):
            return int((folder / "size").read_text().strip().rstrip("K")) << 10
    return 0


def make_ceilings(threads: int, memory_bytes: int) -> dict[str, Ceiling]:
    l2, l3 = cache_bytes(2) or 1 << 20, cache_bytes(3) or 16 << 20
    ceilings = {}
    for count in dict.fromkeys((1, threads)):
        suffix = f", {count} thread{'s' * (count > 1)}"
        ceilings["read from memory" + suffix] = Ceiling("read", count, memory_bytes)
        # Other programs share the L3, so only a quarter of it is used, but more than the L2 caches hold.
        ceilings["read from L3" + suffix] = Ceiling("read", count, max(l3 // 4, 4 * l2 * count))
        ceilings["read from L2" + suffix] = Ceiling("read", count, l2 // 2 * count)
        ceilings["byte products" + suffix] = Ceiling("byte_dot", count)
        ceilings["fp32 FMA" + suffix] = Ceiling("fp32_fma", count)
        ceilings["bf16 products" + suffix] = Ceiling("bf16_dot", count)
        ceilings["bf16 products in tiles" + suffix] = Ceiling("bf16_tiles", count)
        ceilings["int8 products in tiles" + suffix] = Ceiling("int8_tiles", count)
    return {name: ceiling for name, ceiling in ceilings.items() if ceiling.exists}


def layer_kernel(layer: Layer, tokens: int, ceiling: Ceiling, cold_bytes: int) -> Kernel:
    """Make a kernel of all four products of a layer, in 4 bits with minimums. Copies of the layer take turns."""
    weights = []
    for rows, columns in layer.shapes:
        qweight = ops.int4_pack(torch.randint(0, 16, (rows, columns), dtype=torch.uint8))
        scales = ops.pack_scales(torch.rand(rows, columns // GROUP).half())
        weights.append((qweight, scales, scales.clone(), rows, torch.randn(tokens, columns)))
    size = sum(tensor.nbytes for weight in weights for tensor in weight[:3])
    copies = [
        [(*(t.clone() for t in weight[:3]), *weight[3:]) for weight in weights] for _ in range(cold_bytes // size + 1)
    ]
    turn = 0

    def run() -> float:
        nonlocal turn
        turn += 1
        start = time.perf_counter()
        for qweight, scales, mins, rows, x in copies[turn % len(copies)]:
            ops.int4_gemm(x, qweight, scales, mins, rows, activation_bits=8)
        return time.perf_counter() - start

    operations = 2.0 * tokens * sum(rows * columns for rows, columns in layer.shapes)
    return Kernel(run, size if ceiling.resource == "read" else operations, ceiling)


def engine_kernels(llm: LLM, path: Path, read: Ceiling, dot: Ceiling, small: bool) -> dict[str, Kernel]:
    """Make kernels of the whole engine's decoding and prefill, including sampling and detokenisation."""
    tensors = GGUFFile(path).tensors
    prompt, new, prefill = (8, 4, 16) if small else (128, 64, 512)
    config = llm.engine.model.config
    kv_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * llm.engine.config.kv_cache_dtype.itemsize
    # A tied embedding is also the weight of the output projection and is read completely, another one only by row.
    unread = "token_embd.weight" if "output.weight" in tensors else None
    read_bytes = sum(tensor.data.nbytes for name, tensor in tensors.items() if name != unread)
    products = sum(t.shape[0] * t.shape[1] for n, t in tensors.items() if len(t.shape) == 2 and n.startswith("blk."))
    logits = 2.0 * config.vocab_size * config.hidden_size  # for the last token alone
    numbers = iter(range(10**9))

    def run(length: int, count: int) -> list[float]:
        """Generate tokens after a prompt; return the time of the start and of each output."""
        first = 100 + next(numbers) % 1000  # a different prompt each time, so that none is in the cache
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        moments = [time.perf_counter()]
        prompt = {"prompt_token_ids": [first, *range(100, 99 + length)]}
        with contextlib.closing(llm.stream_outputs(prompt, params)) as outputs:
            moments += [time.perf_counter() for _ in outputs]
        return moments

    def decode() -> float:
        moments = run(prompt, new + 1)
        return (moments[-1] - moments[1]) / new

    def first_token() -> float:
        before, after = run(prefill, 1)
        return after - before

    return {
        "engine, decode": Kernel(decode, read_bytes + kv_bytes * (prompt + new / 2), read),
        f"engine, prefill of {prefill}": Kernel(first_token, 2.0 * products * prefill + logits, dot),
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=hub.DEFAULT_MODEL, help="name or path; default: %(default)s")
    parser.add_argument("--threads", type=int, default=_C.get_num_threads(), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=9, help="default: %(default)s")
    parser.add_argument("--out", type=Path, help="folder of the JSON file")
    parser.add_argument("--rehearse", action="store_true", help="small sizes: tests the code, measures nothing")
    args = parser.parse_args(argv)
    _C.set_num_threads(args.threads)
    torch.manual_seed(0)
    path = hub.resolve(args.model)
    ceilings = make_ceilings(args.threads, 1 << 20 if args.rehearse else 512 << 20)
    suffix = f", {args.threads} thread{'s' * (args.threads > 1)}"
    read, dot = ceilings["read from memory" + suffix], ceilings["byte products" + suffix]
    kernels = engine_kernels(LLM(str(path)), path, read, dot, args.rehearse)
    for name, layer in (SMALL_LAYERS if args.rehearse else LAYERS).items():
        for tokens in TOKENS:
            label = f"{name}, {tokens} token{'s' * (tokens > 1)}"
            ceiling = read if tokens == 1 else dot
            kernels[label] = layer_kernel(layer, tokens, ceiling, 0 if args.rehearse else COLD_BYTES)
    for kernel in kernels.values():
        kernel.run()  # warm-up; the ceilings have had theirs
    for _ in range(args.rounds):
        for measured in (*ceilings.values(), *kernels.values()):
            measured.sample()
    print(report(ceilings, kernels))
    if args.out is not None:
        results = {
            "settings": {"model": args.model, "threads": args.threads, "rounds": args.rounds},
            "ceilings": {name: _facts(ceiling) for name, ceiling in ceilings.items()},
            "kernels": {name: _facts(kernel) for name, kernel in kernels.items()},
        }
        for name, kernel in kernels.items():
            results["kernels"][name] |= {"share": statistics.median(kernel.share), "share_samples": kernel.share}
        print(write_json(args.out / "roofline.json", results))


def report(ceilings: dict[str, Ceiling], kernels: dict[str, Kernel]) -> str:
    rows = [["", "median", "best", "of the ceiling"]]
    for name, measured in (ceilings | kernels).items():
        unit = "GB/s" if _resource(measured) == "read" else "GOP/s"
        share = f"{statistics.median(measured.share):.2f}" if isinstance(measured, Kernel) else ""
        median, best = statistics.median(measured.per_s) / 1e9, max(measured.per_s) / 1e9
        rows.append([name, f"{median:.1f} {unit}", f"{best:.1f} {unit}", share])
    return format_table(rows)


def _resource(measured: Ceiling | Kernel) -> str:
    return measured.resource if isinstance(measured, Ceiling) else measured.ceiling.resource


def _facts(measured: Ceiling | Kernel) -> dict[str, Any]:
    """Return the resource, median and samples, in bytes or operations per second."""
    return {"resource": _resource(measured), "per_s": statistics.median(measured.per_s), "samples": measured.per_s}


if __name__ == "__main__":
    main()
