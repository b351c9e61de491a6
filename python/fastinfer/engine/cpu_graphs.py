"""Decode steps on the CPU, recorded when they first occur and then replayed without Python."""

import warnings
from collections.abc import Callable
from dataclasses import replace

import torch

from fastinfer import ops
from fastinfer.engine.batch import Batch, BatchInputs, BatchSize, StepResult

# Larger batches run operator by operator: there Python is a hundredth of a step, and every size has its own graph.
MAX_RECORDED_TOKENS = 64
# Without speculation there are as many graphs as numbers of sequences, with it as many as mixtures of drafts.
MAX_GRAPHS = 256


class CPUGraphs:
    """A graph belongs to one size of batch and is recorded when that size first occurs; recording computes the step as
    well. All graphs read the same inputs and share the memory of their results, as one step follows the other.

    Args:
        compute: calls the operators of a step.
        inputs: which they read.

    Attributes:
        recorded: the graphs and their results.
    """

    def __init__(self, compute: Callable[[Batch], StepResult], inputs: BatchInputs) -> None:
        self.recorded: dict[BatchSize, tuple[ops.CPUGraph, StepResult]] = {}
        self._compute = compute
        self._inputs = inputs
        self._memory = ops.GraphMemory()
        self._works = True

    def run(self, size: BatchSize, decodes: bool) -> StepResult | None:
        """Compute what the inputs hold, unless it is to run operator by operator: ``None``."""
        # Prompts have all lengths, which hardly come again.
        if not self._works or not decodes or size.num_tokens > MAX_RECORDED_TOKENS:
            return None
        if size not in self.recorded:
            return self._record(size)
        graph, result = self.recorded[size]
        graph.replay()
        return result

    def _record(self, size: BatchSize) -> StepResult | None:
        graph = ops.CPUGraph(self._memory)
        batch = self._inputs.batch(size)
        try:
            with graph.capture():
                result = self._compute(batch)
        except ops.GraphCaptureError as error:
            warnings.warn(f"decode steps run operator by operator, which is slower: {error}", stacklevel=2)
            self._works = False
            return None
        if len(self.recorded) == MAX_GRAPHS:
            del self.recorded[next(iter(self.recorded))]
        self.recorded[size] = graph, replace(result, recorded=result.logits.dtype == torch.float32)
        return result
