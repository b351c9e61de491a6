"""Steps on the CPU, recorded and then replayed without Python, which costs 25 us for each operator."""

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import torch

from fastinfer import ops
from fastinfer.engine.batch_inputs import BatchInputs, BatchSize, StepResult
from fastinfer.models.batch import Batch

# Without speculation decoding has as many graphs as numbers of sequences, with it as many as mixtures of drafts.
MAX_GRAPHS = 256
# Steps that decode no more tokens than this are recorded when their size first occurs. Others, above all prompts, which
# have all lengths, wait until it has come so often: recording costs 12 ms, and each replay saves 4 to 7.
MAX_DECODED_TOKENS = 64
OCCURRENCES = 3
MAX_COUNTED = 4096


class CPUGraphs:
    """A graph belongs to one size of batch and is recorded when that size occurs, or does so again; recording computes
    the step as well. All graphs read the same inputs and share the memory of their results, as one step follows the
    other.

    Args:
        compute: calls the operators of a step.
        inputs: which they read.

    Attributes:
        recorded: the graphs and their results, those last that were used last.
    """

    def __init__(self, compute: Callable[[Batch], StepResult], inputs: BatchInputs) -> None:
        self.recorded: dict[BatchSize, tuple[ops.CPUGraph, StepResult]] = {}
        self._compute = compute
        self._inputs = inputs
        self._memory = ops.GraphMemory()
        self._works = True
        self._occurrences: Counter[BatchSize] = Counter()

    def run(self, size: BatchSize, decodes: bool) -> StepResult | None:
        """Compute what the inputs hold, unless it is to run operator by operator: ``None``."""
        if not self._works:
            return None
        if size in self.recorded:
            graph, result = self.recorded[size] = self.recorded.pop(size)
            graph.replay()
            return result
        if not decodes or size.num_tokens > MAX_DECODED_TOKENS:
            self._occurrences[size] += 1
            if self._occurrences[size] < OCCURRENCES:
                if len(self._occurrences) > MAX_COUNTED:
                    self._occurrences.clear()
                return None
            del self._occurrences[size]  # if the graph has to make room, the size counts from the beginning
        return self._record(size)

    def _record(self, size: BatchSize) -> StepResult | None:
        graph = ops.CPUGraph(self._memory)
        batch = self._inputs.batch(size)
        try:
            with graph.capture():
                result = self._compute(batch)
        except ops.GraphCaptureError as error:
            warnings.warn(f"steps run operator by operator, which is slower: {error}", stacklevel=2)
            self._works = False
            return None
        if len(self.recorded) == MAX_GRAPHS:
            del self.recorded[next(iter(self.recorded))]
        self.recorded[size] = graph, replace(result, recorded=result.logits.dtype == torch.float32)
        return result
