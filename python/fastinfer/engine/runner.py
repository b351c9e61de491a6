"""Runs the model on the chunks of a step, by replaying a recorded graph where one exists for the size of the step."""

from dataclasses import replace

from torch import Tensor

from fastinfer.engine.batch_inputs import BatchInputs, BatchSize, StepResult
from fastinfer.engine.cpu_graphs import CPUGraphs
from fastinfer.engine.cuda_graphs import CUDAGraphs, expert_tile_limits
from fastinfer.engine.logits_row import LogitsRow
from fastinfer.engine.scheduler import Chunk
from fastinfer.models import Model
from fastinfer.models.batch import Batch
from fastinfer.models.kv_cache import KVCache


class Runner:
    """Computes the hidden states and logits of a step's chunks.

    Args:
        model: model to run.
        kv_cache: KV cache of the model.
        inputs: input tensors, on the device of the model and the cache.
        enforce_eager: whether to call the operators one by one in all steps, without graphs.
        with_adapters: whether tokens may have LoRA adapters.
        deterministic: whether results must not depend on the other requests. If tokens may have adapters, all steps are
            then computed as if some had: steps without adapters use fused operators, which round in other places.

    Attributes:
        model, kv_cache, inputs: see above.
        graphs: recorded graphs; ``None`` with ``enforce_eager``.
        num_eager_steps: steps that ran operator by operator since the start.
    """

    def __init__(
        self,
        model: Model,
        kv_cache: KVCache,
        inputs: BatchInputs,
        *,
        enforce_eager: bool,
        with_adapters: bool = False,
        deterministic: bool = False,
    ) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self.inputs = inputs
        self._enforce_eager = enforce_eager
        self._with_adapters = with_adapters
        self._always_adapters = with_adapters and deterministic
        self.num_eager_steps = 0
        self.graphs = self._make_graphs()

    def __call__(self, chunks: list[Chunk], rows: list[LogitsRow], drawn: Tensor | None = None) -> StepResult:
        """Compute the chunks and store their keys and values in the blocks of their sequences.

        Args:
            chunks: chunks to compute.
            rows: their rows of logits.
            drawn: [rows] int64 tokens of the last draw, on the device, if some chunks begin with tokens that the host
                does not know yet.
        """
        self.inputs.fill(chunks, rows, drawn)
        size = BatchSize.of(chunks)
        if self._always_adapters:
            size = replace(size, has_adapters=True)
        if self.graphs is not None:
            result = self.graphs.run(size, all(chunk.sequence.is_decoding for chunk in chunks))
            if result is not None:
                return result
        self.num_eager_steps += 1
        self.inputs.upload()
        if self.inputs.has_unknown_tokens:
            self.inputs.insert_drawn(size.num_tokens)
        return self.compute(self.inputs.batch(size))

    def compute(self, batch: Batch) -> StepResult:
        """Compute a batch by calling the model's operators one by one."""
        hidden = self._forward(batch)
        return StepResult(hidden, self._logits(hidden, batch), self.inputs.sampling)

    def _forward(self, batch: Batch) -> Tensor:
        return self.model.forward(batch, self.kv_cache)

    def _logits(self, hidden: Tensor, batch: Batch) -> Tensor:
        return self.model.logits(hidden, batch.logits_indices, batch.logits_adapter_ids)

    def _make_graphs(self) -> CPUGraphs | CUDAGraphs | None:
        if self._enforce_eager:
            return None
        if self.inputs.device.type == "cpu":
            return CPUGraphs(self.compute, self.inputs)
        limits = expert_tile_limits(self.model.config)
        return CUDAGraphs(self._forward, self._logits, self.inputs, limits, self._with_adapters)
