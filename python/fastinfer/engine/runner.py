"""Runs a step's operators: steps whose size has been recorded replay a graph, the others call one by one."""

from dataclasses import replace

from fastinfer.engine.batch_inputs import BatchInputs, BatchSize, StepResult
from fastinfer.engine.cpu_graphs import CPUGraphs
from fastinfer.engine.cuda_graphs import CUDAGraphs
from fastinfer.engine.scheduler import Chunk
from fastinfer.models import Model
from fastinfer.models.batch import Batch
from fastinfer.models.kv_cache import KVCache


class Runner:
    """From chunks to logits.

    Args:
        model: what gives the logits.
        kv_cache: its cache.
        inputs: where batches are written down, for the device of model and cache.
        enforce_eager: use no graphs.
        with_adapters: whether tokens may have LoRA adapters.
        deterministic: where they may, compute all tokens as those that have one: what is fused otherwise is then not,
            and rounds in other places.
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
        self._model = model
        self._kv_cache = kv_cache
        self.inputs = inputs
        self._always_adapters = with_adapters and deterministic
        self.graphs: CPUGraphs | CUDAGraphs | None = None
        if not enforce_eager and inputs.device.type == "cpu":
            self.graphs = CPUGraphs(self.compute, inputs)
        elif not enforce_eager:
            self.graphs = CUDAGraphs(self.compute, inputs, with_adapters)

    def __call__(self, chunks: list[Chunk]) -> StepResult:
        """Compute the chunks, whose blocks are allocated, filling the cache."""
        self.inputs.fill(chunks)
        size = BatchSize.of(chunks)
        if self._always_adapters:
            size = replace(size, has_adapters=True)
        if self.graphs is not None:
            result = self.graphs.run(size, all(chunk.sequence.is_decoding for chunk in chunks))
            if result is not None:
                return result
        self.inputs.upload(size.num_seqs)
        return self.compute(self.inputs.batch(size))

    def compute(self, batch: Batch) -> StepResult:
        """Call the model's operators one by one."""
        hidden = self._model.forward(batch, self._kv_cache)
        return StepResult(hidden, self._model.logits(hidden, batch.logits_indices))
