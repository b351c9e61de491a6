"""Runs a step's operators: steps of few tokens replay a recorded graph, the others call one by one."""

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from fastinfer import ops
from fastinfer.engine.batch import Batch, BatchInputs, BatchSize
from fastinfer.engine.kv_tensors import KVCacheTensors
from fastinfer.engine.scheduler import Chunk

if TYPE_CHECKING:
    from fastinfer.models import Model

# Larger batches run operator by operator: there Python is a hundredth of a step, and every size has its own graph.
MAX_RECORDED_TOKENS = 64
# A graph is about 100 KB. Without speculation there are as many as sequences; with it their number is bounded by this.
MAX_GRAPHS = 256


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the model computed, valid until the next step.

    Attributes:
        hidden: [tokens, hidden] of the last layer, before its norm.
        logits: [n, vocab], as many rows as :func:`fastinfer.engine.batch.num_rows` says, chunk after chunk.
    """

    hidden: Tensor
    logits: Tensor


class Runner:
    """From chunks to logits.

    A graph belongs to one size of batch and is recorded when that size first occurs; recording computes the step as
    well. All graphs read the same inputs and share the memory of their results, as one step follows the other.

    Args:
        model: what gives the logits.
        kv_cache: its cache.
        inputs: where batches are written down.
        device: of model and cache.
        enforce_eager: record nothing.
    """

    def __init__(
        self, model: "Model", kv_cache: KVCacheTensors, inputs: BatchInputs, *, device: str, enforce_eager: bool
    ) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._inputs = inputs
        # A GPU will want its inputs copied over and a torch.cuda.CUDAGraph.
        self._records = not enforce_eager and device == "cpu"
        self._graphs: dict[BatchSize, tuple[ops.CPUGraph, StepResult]] = {}
        self._graph_memory = ops.GraphMemory()

    def __call__(self, chunks: list[Chunk]) -> StepResult:
        """Compute the chunks, whose blocks are allocated, filling the cache."""
        self._inputs.fill(chunks)
        size = BatchSize.of(chunks)
        # Prompts have all lengths, which hardly come again.
        if (
            not self._records
            or size.num_tokens > MAX_RECORDED_TOKENS
            or not all(c.sequence.is_decoding for c in chunks)
        ):
            return self._compute(self._inputs.batch(size))
        if size not in self._graphs:
            return self._record(size)
        graph, result = self._graphs[size]
        graph.replay()
        return result

    def _compute(self, batch: Batch) -> StepResult:
        hidden = self._model.forward(batch, self._kv_cache)
        return StepResult(hidden, self._model.logits(hidden, batch.logits_indices))

    def _record(self, size: BatchSize) -> StepResult:
        batch = self._inputs.batch(size)
        graph = ops.CPUGraph(self._graph_memory)
        try:
            with graph.capture():
                result = self._compute(batch)
        except ops.GraphCaptureError as error:
            warnings.warn(f"decode steps run operator by operator, which is slower: {error}", stacklevel=2)
            self._records = False
            return self._compute(batch)
        if len(self._graphs) == MAX_GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        self._graphs[size] = graph, result
        return result
