"""Timing on a GPU by replaying CUDA graphs between two events, and ceilings of the GPU."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

# Least duration of a sample, long enough to hide the launch of its graph, about 10 us.
MIN_SAMPLE_S = 1e-3
MAX_CALLS = 512


@dataclass(frozen=True)
class Ceilings:
    """Rates that this GPU reaches in a device-to-device copy (bytes read and written) and in an 8192^3 bf16 product."""

    copy_gb_per_s: float
    matmul_gflop_per_s: float

    @classmethod
    def measure(cls, num_bytes: int = 1 << 30, size: int = 8192) -> "Ceilings":
        memory = [torch.empty(num_bytes, dtype=torch.uint8, device="cuda").random_() for _ in range(2)]
        copy = CudaGraphSampler(lambda a, b: b.copy_(a), [(memory[0], memory[1]), (memory[1], memory[0])])
        copy_s = statistics.median(copy.sample() for _ in range(10))
        del copy, memory
        a, b = (torch.randn(size, size, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        product = CudaGraphSampler(torch.matmul, [(a, b)])
        product_s = statistics.median(product.sample() for _ in range(10))
        return cls(2 * num_bytes / copy_s / 1e9, 2 * size**3 / product_s / 1e9)


class CudaGraphSampler:
    """Calls of one candidate, captured in a graph. The arguments take turns, so that the L2 does not hold them.

    The constructor raises an error if the work cannot be captured, for example a copy to the host. It finds that out
    before the capture: torch does not recover from one that failed, and would refuse to draw random numbers after it.
    """

    def __init__(self, run: Callable[..., object], inputs: Sequence[tuple[Any, ...]]) -> None:
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):  # in their first calls, libraries allocate memory and choose algorithms
            run(*inputs[0])
            with without_waiting():
                run(*inputs[0])
            self._begin.record()
            run(*inputs[1 % len(inputs)])
            self._end.record()
        aside.synchronize()
        once_s = max(self._begin.elapsed_time(self._end) / 1e3, 1e-6)
        calls = min(max(int(MIN_SAMPLE_S / once_s), 1), MAX_CALLS)
        # A multiple of the inputs, so that each replay starts with the first ones.
        self._calls = -(-calls // len(inputs)) * len(inputs)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for i in range(self._calls):
                run(*inputs[i % len(inputs)])
        self.sample()

    def sample(self) -> float:
        """Take a sample, and return the seconds per call."""
        self._begin.record()
        self._graph.replay()
        self._end.record()
        self._end.synchronize()
        return self._begin.elapsed_time(self._end) / 1e3 / self._calls


@contextmanager
def without_waiting() -> Iterator[None]:
    """Raise an error where the host would wait for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
