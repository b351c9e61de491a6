"""Decode steps on a GPU, captured as CUDA graphs when the engine starts. Not yet run on a GPU."""

from bisect import bisect_left
from collections.abc import Callable

import torch
from tqdm import tqdm

from fastinfer.engine.batch_inputs import BatchInputs, BatchSize, StepResult
from fastinfer.models.batch import Batch

# Larger steps run operator by operator: there the GPU is busy for longer than Python needs.
MAX_CAPTURED_TOKENS = 256


def bucket_sizes(limit: int) -> list[int]:
    """Tokens of the steps that are captured: 1, 2, 4, the multiples of 8, and the limit.

    Products have tiles of 8, 16, 32, 64 or 128 tokens. A step that decodes has the same tiles as its bucket, so that
    padding does not change a bit of its result.
    """
    return [n for n in (1, 2, 4, *range(8, limit, 8)) if n < limit] + [limit]


class CUDAGraphs:
    """A graph for each bucket; a step takes the smallest that holds it, and is padded.

    A bucket of n has n tokens, n sequences and n rows of logits, so that sequences with and without drafts fit alike.
    Padding tokens belong to no sequence and have no slot, padding sequences have no queries, and padding rows of logits
    are copies of the first.

    Results are copied to the same tensors by all graphs; else each would keep its own memory for them.

    Args:
        compute: calls the operators of a step.
        inputs: which they read; the largest bucket has as many tokens as these have sequences.
        with_adapters: capture each bucket for tokens with LoRA adapters as well.
    """

    def __init__(self, compute: Callable[[Batch], StepResult], inputs: BatchInputs, with_adapters: bool) -> None:
        self._compute = compute
        self._inputs = inputs
        self._buckets = bucket_sizes(min(inputs.max_seqs, inputs.max_tokens, MAX_CAPTURED_TOKENS))
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self._capture_all((False, True) if with_adapters else (False,))

    def run(self, size: BatchSize, decodes: bool) -> StepResult | None:
        """Compute what the inputs hold, unless it is to run operator by operator: ``None``."""
        index = bisect_left(self._buckets, max(size.num_tokens, size.num_logits))
        if not decodes or index == len(self._buckets):
            return None
        bucket = self._buckets[index]
        self._inputs.pad(size, bucket)
        self._inputs.upload(size.num_seqs)
        self._graphs[bucket, size.has_adapters].replay()
        return StepResult(self._hidden[: size.num_tokens], self._logits[: size.num_logits])

    @torch.inference_mode()
    def _capture_all(self, adapters: tuple[bool, ...]) -> None:
        """The largest first: the others find room in its memory."""
        sizes = [BatchSize(n, n, n, has_adapters) for n in reversed(self._buckets) for has_adapters in adapters]
        self._inputs.pad(BatchSize(0, 0, 0, False), self._buckets[-1])
        self._inputs.upload(0)
        first = self._compute(self._inputs.batch(sizes[0]))
        self._hidden, self._logits = torch.empty_like(first.hidden), torch.empty_like(first.logits, dtype=torch.float32)
        pool = None
        for size in tqdm(sizes, desc="capturing CUDA graphs", unit="graph", leave=False, disable=None):
            graph = capture(self._step(size), pool)
            pool = graph.pool()
            self._graphs[size.num_tokens, size.has_adapters] = graph

    def _step(self, size: BatchSize) -> Callable[[], None]:
        batch = self._inputs.batch(size)

        def step() -> None:
            result = self._compute(batch)
            self._hidden[: size.num_tokens].copy_(result.hidden)
            self._logits[: size.num_logits].copy_(result.logits)

        return step


def capture(step: Callable[[], None], pool: object) -> torch.cuda.CUDAGraph:
    """Record a step; memory comes from the pool of other graphs, of which one runs at a time, or from a new one.

    It runs once before, as the first launch of a kernel loads it, which must not happen in a capture.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # Other threads may use the GPU meanwhile.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):  # type: ignore[arg-type]
        step()
    return graph
