"""CPU steps recorded as graphs and replayed without Python, whose overhead is 25 us per operator."""

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import torch

from fastinfer import ops
from fastinfer.engine.batch_inputs import BatchInputs, BatchSize, StepResult
from fastinfer.engine.recorded_draws import RecordedDraws
from fastinfer.models.batch import Batch
from fastinfer.utils.forks import renew_in_children

# Without speculation there is one graph per number of decoding sequences; with it, one per mixture of drafts.
MAX_GRAPHS = 256
# Decode steps of up to MAX_DECODED_TOKENS tokens are recorded when their size first occurs. Other steps, mostly prompts
# of any length, are recorded when their size has occurred OCCURRENCES times: recording costs 12 ms, and each replay
# saves 4 to 7 ms.
MAX_DECODED_TOKENS = 64
OCCURRENCES = 3
MAX_COUNTED = 4096
# Sizes whose recording failed, after which no further ones are tried: the model cannot be recorded.
MAX_FAILED = 256
NOT_CAPTURED = "steps of some sizes run operator by operator, which is slower"


class CPUGraphs:
    """Records one graph per size of batch, and replays it when the size occurs again.

    Recorded kernels keep the settings under which they were called. The size says which tokens are those of prompts,
    so no graph is replayed for other ones.

    Recording a step also computes it. All graphs read the same inputs. They share the memory of their results, because
    the results of a step are used before the next step begins.

    Args:
        compute: function that calls the operators of a step, see :meth:`fastinfer.engine.runner.Runner.compute`.
        inputs: input tensors of all steps.

    Attributes:
        recorded: for each size the graph and its results; the least recently used entry comes first.
        failed: sizes that could not be recorded, whose steps run operator by operator.
    """

    def __init__(self, compute: Callable[[Batch, int], StepResult], inputs: BatchInputs) -> None:
        self.recorded: dict[BatchSize, tuple[ops.CPUGraph, StepResult]] = {}
        self._compute = compute
        self._inputs = inputs
        self._memory = ops.GraphMemory()
        self._draws_memory = ops.GraphMemory()  # another, as a draw reads the results of its step
        self.failed: set[BatchSize] = set()
        self._occurrences: Counter[BatchSize] = Counter()
        renew_in_children(self)

    def renew_after_fork(self) -> None:
        """Forget the graphs: a thread that recorded one when the process was forked never ends that in the child."""
        self.recorded.clear()
        self._memory = ops.GraphMemory()
        self._draws_memory = ops.GraphMemory()

    def run(self, size: BatchSize, is_decode: bool) -> StepResult | None:
        """Compute the step in the inputs with a graph; ``None`` if it has to run operator by operator.

        Args:
            size: sizes of the batch.
            is_decode: whether all sequences decode.
        """
        if (entry := self.recorded.pop(size, None)) is not None:
            self.recorded[size] = entry
            graph, result = entry
            graph.replay()
            return result
        if size in self.failed or len(self.failed) == MAX_FAILED:
            return None
        if not is_decode or size.num_tokens > MAX_DECODED_TOKENS:
            self._occurrences[size] += 1
            if self._occurrences[size] < OCCURRENCES:
                if len(self._occurrences) > MAX_COUNTED:
                    self._occurrences.clear()
                return None
            del self._occurrences[size]  # once the graph is dropped to make room, the count starts again
        return self._record(size)

    def _record(self, size: BatchSize) -> StepResult | None:
        """Record and compute a step; ``None`` if it cannot be recorded."""
        graph = ops.CPUGraph(self._memory)
        batch = self._inputs.batch(size)
        try:
            with graph.capture():
                result = self._compute(batch, size.first_prompt_row)
        except ops.GraphCaptureError as error:
            if not self.failed:  # a model that cannot be recorded at one size usually cannot at any
                warnings.warn(f"{NOT_CAPTURED}: {error}", stacklevel=2)
            self.failed.add(size)
            return None
        if len(self.recorded) == MAX_GRAPHS:
            del self.recorded[next(iter(self.recorded))]
        if result.logits.dtype == torch.float32:
            result = replace(result, draws=RecordedDraws(result.logits, self._inputs.sampling, self._draws_memory))
        self.recorded[size] = graph, result
        return result
