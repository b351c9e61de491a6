"""Steps on a GPU, captured as CUDA graphs when the engine starts."""

import gc
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from tqdm import tqdm

from fastinfer import ops
from fastinfer.engine.batch_inputs import ALL_ROWS, BatchInputs, BatchSize, StepResult
from fastinfer.engine.cpu_graphs import NOT_CAPTURED
from fastinfer.models.batch import Batch
from fastinfer.models.config import ModelConfig
from fastinfer.ops.prompt import NO_ROW

# Larger steps run operator by operator: they keep the GPU busy for longer than Python needs to launch the operators.
MAX_DECODED_TOKENS = 256
MAX_CAPTURED_TOKENS = 2048
# Matrix products of more than 64 tokens have tiles of 128 or 256.
WIDE_TILE = 128


def expert_tile_limits(config: ModelConfig) -> list[int]:
    """Return the largest numbers of tokens for which the products of experts have tiles of 8, of 32 and of 128 rows.

    The tile is chosen for an even share of the rows, of which a token has one per expert that it chooses. Without
    experts there are no such limits.
    """
    if not config.num_experts:
        return []
    return [share * config.num_experts // config.experts_per_token for share in (8, 32, 256)]


def decode_buckets(limit: int, expert_limits: list[int]) -> list[int]:
    """Return the numbers of tokens for which decode steps are captured: 1, 2, 4, the multiples of 8, and limits.

    Matrix products have tiles of 8, 16, 32, 64, 128 or 256 tokens. A decode step uses the same tiles as its bucket, so
    that padding does not change a single bit of its result.
    """
    return sorted({n for n in (1, 2, 4, *range(8, limit, 8), *expert_limits) if n < limit} | {limit})


def prefill_buckets(limit: int, expert_limits: list[int]) -> list[int]:
    """Return the numbers of tokens for which steps with prompts are captured: full tiles, and limits.

    These are the fewest buckets in which a step has as many tiles as its bucket, of the same size. Its padding fills a
    tile that matrix products compute anyway, and changes no bit of the result, see :func:`decode_buckets`.
    """
    full_tiles = 8, 16, 32, 64, *range(WIDE_TILE, limit, WIDE_TILE)
    return sorted({n for n in (*full_tiles, *expert_limits) if n < limit} | {limit})


class CUDAGraphs:
    """Captures one graph per bucket; each step is padded to the smallest bucket that holds it.

    The shapes of a batch need no graphs of their own: attention is planned on the device, and its launch is the same
    for any batch. :meth:`BatchInputs.pad <fastinfer.engine.batch_inputs.BatchInputs.pad>` describes the padding.

    The graph of a decode step inserts the tokens that the last step has drawn, and ends by drawing the next ones. A
    step ahead is therefore one copy of the inputs, one replay, and one copy of the tokens to the host. Masks are not in
    the graph: the host computes them while the GPU computes the logits. A bucket of n has n tokens, n sequences and n
    rows of logits, so that steps with and without drafts use the same buckets.

    The graph of a step with prompts ends with the hidden states: the number of rows of logits, which chooses the tiles
    of the output layer, does not follow from that of the tokens. If the model's last layers store nothing, they have
    room for as many rows as there may be sequences; a step that wants more, as log-probabilities of a prompt do, runs
    operator by operator.

    With sparse attention the graph of a step with prompts is for tokens of prompts alone, which attend to everything.
    Steps with both prompts and generated tokens run operator by operator.

    All graphs are captured at the start, so that no request waits for a capture or for memory. They share one memory
    pool and copy their results to the same tensors. As only one runs at a time, the pool holds the activations of the
    largest bucket.

    Args:
        forward: function that computes the hidden states of a batch.
        logits: function that computes the logits of a batch from its hidden states.
        inputs: input tensors of all steps.
        expert_limits: see :func:`expert_tile_limits`.
        with_adapters: whether to capture each bucket also for tokens with LoRA adapters.

    Attributes:
        failed: the padded sizes of the graphs that could not be captured.
    """

    def __init__(
        self,
        forward: Callable[[Batch], Tensor],
        logits: Callable[[Tensor, Batch], Tensor],
        inputs: BatchInputs,
        expert_limits: list[int],
        with_adapters: bool,
    ) -> None:
        self._forward = forward
        self._compute_logits = logits
        self._inputs = inputs
        max_decoded = min(inputs.max_seqs, inputs.max_tokens, MAX_DECODED_TOKENS)
        self._decode_buckets = decode_buckets(max_decoded, expert_limits)
        self._prefill_buckets = prefill_buckets(min(inputs.max_tokens, MAX_CAPTURED_TOKENS), expert_limits)
        # Of a step with prompts that has a graph; NO_ROW if roles do not matter, as on a GPU without sparse attention.
        self._first_prompt_row = NO_ROW if inputs.sparse_attention is None else 0
        self._graphs: dict[BatchSize, torch.cuda.CUDAGraph] = {}
        self.failed: set[BatchSize] = set()
        self._capture_all((False, True) if with_adapters else (False,))

    def run(self, size: BatchSize, is_decode: bool) -> StepResult | None:
        """Compute the step in the inputs with a graph; ``None`` if it has to run operator by operator.

        Args:
            size: sizes of the batch.
            is_decode: whether all sequences decode.
        """
        padded = self._padded_size(size, is_decode)
        if padded is None:
            return None
        inputs, rows = self._inputs, slice(size.num_logits)
        inputs.pad(size, padded)
        inputs.upload()
        self._graphs[padded].replay()
        hidden = self._hidden[: size.num_hidden]
        if padded.num_logits:
            return StepResult(hidden, self._logits[rows], inputs.sampling, tokens=inputs.drawn[rows])
        return StepResult(hidden, self._compute_logits(hidden, inputs.batch(size)), inputs.sampling)

    def _padded_size(self, size: BatchSize, is_decode: bool) -> BatchSize | None:
        """Return the captured size that a step of this size is padded to; ``None`` if there is none."""
        candidates = []
        decodes = is_decode and size.num_wanted == ALL_ROWS
        if decodes and (bucket := _smallest(self._decode_buckets, max(size.num_tokens, size.num_logits))):
            candidates.append(self._decode_size(bucket, size.has_adapters, size.first_layer))
        is_recorded = self._first_prompt_row in (NO_ROW, size.first_prompt_row)
        if is_recorded and not size.first_layer and (bucket := _smallest(self._prefill_buckets, size.num_tokens)):
            candidates.append(self._prefill_size(bucket, size.has_adapters))
        fitting = (padded for padded in candidates if padded in self._graphs and size.num_hidden <= padded.num_hidden)
        return next(fitting, None)

    def _decode_size(self, bucket: int, has_adapters: bool, first_layer: int = 0) -> BatchSize:
        return BatchSize(bucket, bucket, bucket, has_adapters, first_layer=first_layer)

    def _prefill_size(self, bucket: int, has_adapters: bool) -> BatchSize:
        num_seqs = min(bucket, self._inputs.max_seqs)
        num_wanted = num_seqs if self._inputs.drops_rows else ALL_ROWS
        return BatchSize(num_seqs, bucket, 0, has_adapters, self._first_prompt_row, num_wanted)

    @torch.inference_mode()
    def _capture_all(self, adapters: tuple[bool, ...]) -> None:
        """Capture all graphs, the largest first, so that the others can use its memory."""
        sizes = [
            self._prefill_size(n, has_adapters) for n in reversed(self._prefill_buckets) for has_adapters in adapters
        ]
        largest = sizes[0]._replace(num_logits=self._decode_buckets[-1])
        sizes += [
            self._decode_size(n, has_adapters, first_layer)
            for n in reversed(self._decode_buckets)
            for has_adapters in adapters
            for first_layer in range(self._inputs.head_layers or 1)
        ]
        self._inputs.pad(BatchSize(0, 0, 0, False), largest)
        self._inputs.upload()
        batch = self._inputs.batch(largest)
        hidden = self._forward(batch)
        self._hidden = torch.empty_like(hidden)
        self._logits = torch.empty_like(self._compute_logits(hidden, batch), dtype=torch.float32)
        # Memory that a graph has freed serves a later one only if both were captured on one stream.
        stream, pool = torch.cuda.Stream(), None
        with without_garbage_collection():
            for size in tqdm(sizes, desc="capturing CUDA graphs", unit="graph", leave=False, disable=None):
                try:
                    graph = capture(self._make_step(size), stream, pool)
                except RuntimeError as error:
                    if not self.failed:
                        warnings.warn(f"{NOT_CAPTURED}: {error}", stacklevel=2)
                    self.failed.add(size)
                else:
                    pool = graph.pool()
                    self._graphs[size] = graph

    def _make_step(self, size: BatchSize) -> Callable[[], None]:
        """Return a function that computes a step of this size and copies the results to the common tensors."""
        inputs, batch = self._inputs, self._inputs.batch(size)
        hidden, logits = self._hidden[: size.num_hidden], self._logits[: size.num_logits]
        sampling, drawn = inputs.sampling.tensors(size.num_logits), inputs.drawn[: size.num_logits]

        def step() -> None:
            inputs.insert_drawn(size.num_tokens)
            hidden.copy_(self._forward(batch))
            if size.num_logits:
                logits.copy_(self._compute_logits(hidden, batch))
                drawn.copy_(ops.sample(logits, **sampling, num_logprobs=None).tokens)

        return step


def _smallest(buckets: list[int], count: int) -> int | None:
    """Return the smallest bucket that holds as many; ``None`` if none does."""
    index = bisect_left(buckets, count)
    return buckets[index] if index < len(buckets) else None


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Collect garbage before the block, and none in it.

    To destroy the graphs of an engine that is gone is among the calls that break a capture.
    """
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def capture(step: Callable[[], None], stream: torch.cuda.Stream, pool: object) -> torch.cuda.CUDAGraph:
    """Capture a step as a CUDA graph of the current GPU.

    The step runs once before the capture: the first launch of a kernel loads it, which a capture does not allow.

    Args:
        step: function that launches the kernels.
        stream: stream to capture on, of the current GPU.
        pool: memory pool of other graphs, of which only one runs at a time; ``None`` for a new pool.
    """
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # Without a given stream, a capture uses one of the GPU that the process captured on first. Only this thread's calls
    # are checked, as other threads may use the GPU at the same time.
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):  # type: ignore[arg-type]
        step()
    return graph
