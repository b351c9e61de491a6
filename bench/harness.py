"""Harness of the benchmarks of single operators.

Candidates are timed in turns (A, B, C, A, B, C, ...), so that changes of the machine's speed affect all of them. The
table shows medians, ratios to the first candidate and, on a GPU, ratios to the ceilings measured in the same run.
"""

import argparse
import itertools
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import cuda_timing
import torch
from cuda_timing import Ceilings, CudaGraphSampler

from fastinfer.benchmarks.report import percentile, write_json
from fastinfer.utils.table import format_table

# Shorter samples would be dominated by jitter of the clock and the interpreter, so calls are repeated to fill a sample.
MIN_SAMPLE_S = 2e-3
# More than the last-level caches of common machines: 384 MB on a server with 96 cores, 50 to 60 MB on a GPU.
COLD_BYTES = {"cpu": 512 << 20, "cuda": 256 << 20}
MAX_COPIES = 256  # so small arguments stay warm, as they do in a real model


@dataclass(frozen=True)
class Timing:
    """Samples of one candidate, in seconds per call, and the bytes and operations of one call.

    A candidate that cannot run has no samples but an error.
    """

    name: str
    samples_s: list[float]
    bytes_moved: int | None
    flops: int | None
    error: str | None = None

    @property
    def median_s(self) -> float:
        return statistics.median(self.samples_s)

    @property
    def gb_per_s(self) -> float | None:
        return None if self.bytes_moved is None else self.bytes_moved / self.median_s / 1e9

    @property
    def gflop_per_s(self) -> float | None:
        return None if self.flops is None else self.flops / self.median_s / 1e9


class Cases(dict[str, list[Timing]]):
    """Comparisons by label; ``save`` is called after each, so that a benchmark that is stopped does not lose them."""

    def __init__(self, save: Callable[["Cases"], object] = lambda _: None) -> None:
        self._save = save

    def __setitem__(self, label: str, timings: list[Timing]) -> None:
        super().__setitem__(label, timings)
        self._save(self)


@dataclass(frozen=True)
class Setting:
    """Device and extent of a benchmark.

    Attributes:
        device: "cpu" or "cuda".
        repeats: number of samples per candidate.
        rehearsal: whether to use small sizes, and the CPU for GPU cases, which tests the code and measures nothing.
        cases: what has been measured.
    """

    device: str
    repeats: int
    rehearsal: bool = False
    cases: Cases = field(default_factory=Cases)

    def size(self, real: int, small: int) -> int:
        return small if self.rehearsal else real


def compare(
    candidates: dict[str, Callable[..., object]],
    inputs: Sequence[tuple[Any, ...]],
    *,
    repeats: int = 20,
    bytes_moved: int | None = None,
    flops: int | None = None,
) -> list[Timing]:
    """Time callables that do the same work, on the device of the inputs.

    Args:
        candidates: callables by name; the others are compared with the first one.
        inputs: argument tuples that successive calls of all candidates use in turn. A single tuple measures warm
            caches, those of :func:`cold_inputs` measure cold ones.
        repeats: number of samples per candidate.
        bytes_moved: least number of bytes that one call reads and writes.
        flops: floating-point operations of one call.
    """
    on_gpu = any(isinstance(value, torch.Tensor) and value.is_cuda for value in inputs[0])
    turns = itertools.cycle(inputs)  # shared, so that no candidate gets inputs that the previous one has just read
    ready: dict[str, CpuSampler | CudaGraphSampler] = {}
    errors: dict[str, str] = {}
    for name, run in candidates.items():
        try:
            ready[name] = CudaGraphSampler(run, inputs) if on_gpu else CpuSampler(run, turns)  # also warms up
        except Exception as error:  # one candidate may not support the case; the others continue
            errors[name] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            if on_gpu:
                torch.cuda.synchronize()
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(repeats):
        for name, calls in ready.items():
            samples[name].append(calls.sample())
    return [Timing(name, samples[name], bytes_moved, flops, errors.get(name)) for name in candidates]


def cold_inputs(make: Callable[[], tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Make copies of the arguments that together exceed every cache, so that each call reads them from memory."""
    first = make()
    tensors = [value for value in first if isinstance(value, torch.Tensor)]
    copies = COLD_BYTES[tensors[0].device.type] // sum(value.nbytes for value in tensors)
    return [first, *(make() for _ in range(min(copies, MAX_COPIES)))]


class CpuSampler:
    """Repeats calls of one candidate to fill a sample; successive calls take the next arguments."""

    def __init__(self, run: Callable[..., object], turns: Iterator[tuple[Any, ...]]) -> None:
        self._run = run
        self._turns = turns
        self._calls = 1
        while self._seconds() < MIN_SAMPLE_S:
            self._calls *= 2

    def sample(self) -> float:
        """Take a sample, and return the seconds per call."""
        return self._seconds() / self._calls

    def _seconds(self) -> float:
        start = time.perf_counter()
        for _ in range(self._calls):
            self._run(*next(self._turns))
        return time.perf_counter() - start


HEAD = ["case", "candidate", "median us", "p95 us", "x first", "GB/s", "GFLOP/s", "of copy", "of matmul"]


def rows(label: str, timings: Sequence[Timing], ceilings: Ceilings | None = None) -> list[list[str]]:
    """Return the table rows of one comparison, with the columns of :data:`HEAD`."""
    base = timings[0].median_s if timings[0].samples_s else None
    return [[label, timing.name, *_cells(timing, base, ceilings)] for timing in timings]


def _cells(timing: Timing, base: float | None, ceilings: Ceilings | None) -> list[str]:
    if not timing.samples_s:
        return ["failed", *[""] * (len(HEAD) - 3)]
    gb_per_s, gflop_per_s = timing.gb_per_s, timing.gflop_per_s
    return [
        f"{timing.median_s * 1e6:.1f}",
        f"{percentile(timing.samples_s, 95) * 1e6:.1f}",
        "" if base is None else f"{timing.median_s / base:.2f}",
        "" if gb_per_s is None else f"{gb_per_s:.1f}",
        "" if gflop_per_s is None else f"{gflop_per_s:.1f}",
        "" if gb_per_s is None or ceilings is None else f"{gb_per_s / ceilings.copy_gb_per_s:.2f}",
        "" if gflop_per_s is None or ceilings is None else f"{gflop_per_s / ceilings.matmul_gflop_per_s:.2f}",
    ]


def main(
    operator: str,
    cpu: Callable[[Setting], Cases] | None = None,
    cuda: Callable[[Setting], Cases] | None = None,
) -> None:
    """Run a benchmark as the command line says, print its table, and write ``<operator>.json`` to ``--out``.

    Args:
        operator: base name of the operator.
        cpu, cuda: functions that run the cases of each device; ``None`` if there are none.
    """
    parser = argparse.ArgumentParser(description=f"Benchmark of {operator}.")
    devices = [name for name, cases in (("cpu", cpu), ("cuda", cuda)) if cases is not None]
    default = "cuda" if torch.cuda.is_available() and "cuda" in devices else devices[0]
    parser.add_argument("--device", choices=devices, default=default, help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=20, help="samples per candidate; default: %(default)s")
    parser.add_argument("--out", type=Path, help="folder of the JSON file")
    parser.add_argument("--rehearse", action="store_true", help="small sizes, GPU cases: measures nothing")
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.rehearse:
        global MAX_COPIES
        MAX_COPIES, cuda_timing.MIN_SAMPLE_S = 1, 0.0
    device = "cpu" if args.rehearse and not torch.cuda.is_available() else args.device
    run = cuda if args.rehearse or args.device == "cuda" else cpu
    assert run is not None
    ceilings = Ceilings.measure(*((4096, 64) if args.rehearse else ())) if device == "cuda" else None
    written = None if args.out is None else args.out / f"{operator}.json"

    def save(cases: Cases) -> None:
        if written is not None:
            measured: dict[str, Any] = {"operator": operator, "ceilings": ceilings and asdict(ceilings)}
            measured["cases"] = {label: [asdict(timing) for timing in timings] for label, timings in cases.items()}
            write_json(written, measured)

    setting = Setting(device, args.repeats, args.rehearse, Cases(save))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # by bench/gpu_check.py, after its time
    try:
        with torch.inference_mode():
            run(setting)
    finally:
        _print_cases(setting.cases, ceilings)
        if written is not None:
            print(written)


def _print_cases(cases: Cases, ceilings: Ceilings | None) -> None:
    print(format_table([HEAD, *(row for label, timings in cases.items() for row in rows(label, timings, ceilings))]))
    failed = {f"{timing.name}: {timing.error}" for timings in cases.values() for timing in timings if timing.error}
    for line in sorted(failed):
        print(f"failed: {line}")
