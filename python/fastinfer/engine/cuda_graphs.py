"""Decode steps on a GPU, captured as CUDA graphs when the engine starts. Not yet run on a GPU."""

import warnings
from bisect import bisect_left
from collections.abc import Callable

import torch
from tqdm import tqdm

from fastinfer import ops
from fastinfer.engine.batch_inputs import BatchInputs, BatchSize, StepResult
from fastinfer.engine.cpu_graphs import NOT_CAPTURED
from fastinfer.models.batch import Batch

# Larger steps run operator by operator: they keep the GPU busy for longer than Python needs to launch the operators.
MAX_CAPTURED_TOKENS = 256


def bucket_sizes(limit: int) -> list[int]:
    """Return the numbers of tokens for which steps are captured: 1, 2, 4, the multiples of 8, and the limit.

    Matrix products have tiles of 8, 16, 32, 64 or 128 tokens. A decode step uses the same tiles as its bucket, so that
    padding does not change a single bit of its result.
    """
    return [n for n in (1, 2, 4, *range(8, limit, 8)) if n < limit] + [limit]


class CUDAGraphs:
    """Captures one graph per bucket; each decode step is padded to the smallest bucket that holds it.

    A bucket of n has n tokens, n sequences and n rows of logits, so that steps with and without drafts use the same
    buckets. :meth:`BatchInputs.pad <fastinfer.engine.batch_inputs.BatchInputs.pad>` describes the padding.

    All graphs copy their results to the same tensors; otherwise each graph would need memory for its own.

    Each graph first inserts the tokens that the last step has drawn, and at last draws the next ones, so that a step
    ahead is one copy of the inputs, one replay, and one copy of the tokens to the host. Masks are not in the graph: the
    host computes them while the GPU computes the logits.

    Args:
        compute: function that calls the operators of a step.
        inputs: input tensors of all steps; the largest bucket has ``inputs.max_seqs`` tokens, or
            ``MAX_CAPTURED_TOKENS`` if that is less.
        with_adapters: whether to capture each bucket also for tokens with LoRA adapters.

    Attributes:
        failed: the number of tokens, and whether some have adapters, of each graph that could not be captured.
    """

    def __init__(self, compute: Callable[[Batch], StepResult], inputs: BatchInputs, with_adapters: bool) -> None:
        self._compute = compute
        self._inputs = inputs
        self._buckets = bucket_sizes(min(inputs.max_seqs, inputs.max_tokens, MAX_CAPTURED_TOKENS))
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self.failed: set[tuple[int, bool]] = set()
        self._capture_all((False, True) if with_adapters else (False,))

    def run(self, size: BatchSize, is_decode: bool) -> StepResult | None:
        """Compute the step in the inputs with a graph; ``None`` if it has to run operator by operator.

        Args:
            size: sizes of the batch.
            is_decode: whether all sequences decode.
        """
        index = bisect_left(self._buckets, max(size.num_tokens, size.num_logits))
        if not is_decode or index == len(self._buckets):
            return None
        bucket = self._buckets[index]
        if (bucket, size.has_adapters) in self.failed:
            return None
        self._inputs.pad(size, bucket)
        self._inputs.upload()
        self._graphs[bucket, size.has_adapters].replay()
        inputs, rows = self._inputs, slice(size.num_logits)
        return StepResult(
            self._hidden[: size.num_tokens], self._logits[rows], inputs.sampling, tokens=inputs.drawn[rows]
        )

    @torch.inference_mode()
    def _capture_all(self, adapters: tuple[bool, ...]) -> None:
        """Capture all graphs, the largest first, so that the others can use its memory."""
        sizes = [BatchSize(n, n, n, has_adapters) for n in reversed(self._buckets) for has_adapters in adapters]
        self._inputs.pad(BatchSize(0, 0, 0, False), self._buckets[-1])
        self._inputs.upload()
        first = self._compute(self._inputs.batch(sizes[0]))
        self._hidden, self._logits = torch.empty_like(first.hidden), torch.empty_like(first.logits, dtype=torch.float32)
        pool = None
        for size in tqdm(sizes, desc="capturing CUDA graphs", unit="graph", leave=False, disable=None):
            key = size.num_tokens, size.has_adapters
            try:
                graph = capture(self._make_step(size), pool)
            except RuntimeError as error:
                if not self.failed:
                    warnings.warn(f"{NOT_CAPTURED}: {error}", stacklevel=2)
                self.failed.add(key)
            else:
                pool = graph.pool()
                self._graphs[key] = graph

    def _make_step(self, size: BatchSize) -> Callable[[], None]:
        """Return a function that computes a step of this size and copies the results to the common tensors."""
        inputs, rows = self._inputs, slice(size.num_logits)
        batch, sampling, logits = inputs.batch(size), inputs.sampling.tensors(size.num_logits), self._logits[rows]

        def step() -> None:
            inputs.insert_drawn(size.num_tokens)
            result = self._compute(batch)
            self._hidden[: size.num_tokens].copy_(result.hidden)
            logits.copy_(result.logits)
            inputs.drawn[rows].copy_(ops.sample(logits, **sampling, num_logprobs=None).tokens)

        return step


def capture(step: Callable[[], None], pool: object) -> torch.cuda.CUDAGraph:
    """Capture a step as a CUDA graph of the current GPU.

    The step runs once before the capture: the first launch of a kernel loads it, which a capture does not allow.

    Args:
        step: function that launches the kernels.
        pool: memory pool of other graphs, of which only one runs at a time; ``None`` for a new pool.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # Without a stream of its own, a capture uses one of the GPU that the process captured on first. Only this thread's
    # calls are checked, as other threads may use the GPU at the same time.
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):  # type: ignore[arg-type]
        step()
    return graph
