"""Runs a step's operators: steps that only decode replay a recorded graph, the others call one by one."""

import warnings
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fastinfer import ops
from fastinfer.engine.batch import Batch, DecodeInputs
from fastinfer.engine.kv_cache import KVCacheTensors
from fastinfer.engine.sampler import Sampler
from fastinfer.engine.scheduler import Chunk

if TYPE_CHECKING:
    from fastinfer.models import Model

# Larger batches run operator by operator: there Python is a hundredth of a step, and every size has its own graph.
MAX_RECORDED_SEQS = 64


class Runner:
    """From chunks to drawn tokens.

    A graph belongs to one number of sequences and is recorded when that number first occurs; recording computes the
    step as well. All graphs read the same inputs and share the memory of their results, as one step follows the other.

    Args:
        model: what gives the logits.
        sampler: what draws from them.
        kv_cache: its cache.
        block_size: tokens per block of the cache.
        max_blocks: of one sequence.
        max_num_seqs: at most so many sequences come at a time.
        device: of model and cache.
        enforce_eager: record nothing.
    """

    def __init__(
        self,
        model: "Model",
        sampler: Sampler,
        kv_cache: KVCacheTensors,
        *,
        block_size: int,
        max_blocks: int,
        max_num_seqs: int,
        device: str,
        enforce_eager: bool,
    ) -> None:
        self._model = model
        self._sampler = sampler
        self._kv_cache = kv_cache
        self._block_size = block_size
        self._device = device
        # A GPU will want its inputs copied over and a torch.cuda.CUDAGraph.
        self._max_recorded = 0 if enforce_eager or device != "cpu" else min(max_num_seqs, MAX_RECORDED_SEQS)
        self._inputs = DecodeInputs(self._max_recorded, max_blocks, block_size)
        self._graphs: dict[int, tuple[ops.CPUGraph, Tensor, Tensor | None]] = {}
        self._graph_memory = ops.GraphMemory()

    def __call__(self, chunks: list[Chunk]) -> tuple[Tensor, Tensor]:
        """Compute the chunks, whose blocks are allocated, filling the cache; draw for the sequences of the sampler.

        Returns:
            Logits [n, vocab] fp32 of the chunks that end their sequence, and the tokens [n] int64 drawn from them;
            valid until the next call.
        """
        if len(chunks) <= self._max_recorded and all(chunk.num_tokens == 1 and chunk.is_last for chunk in chunks):
            logits, drawn = self._decode(chunks)
        else:
            logits, drawn = self._compute(Batch.build(chunks, self._block_size, self._device))
        if drawn is None:
            logits = logits.float()
            drawn = self._sampler.draw(logits)
        return logits, drawn

    def _compute(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Logits and tokens; no tokens yet where the logits must be converted first, which a graph cannot record."""
        logits = self._model.forward(batch, self._kv_cache)
        return logits, self._sampler.draw(logits) if logits.dtype == torch.float32 else None

    def _decode(self, chunks: list[Chunk]) -> tuple[Tensor, Tensor | None]:
        self._inputs.fill(chunks)
        if len(chunks) not in self._graphs:
            return self._record(len(chunks))
        graph, logits, drawn = self._graphs[len(chunks)]
        graph.replay()
        return logits, drawn

    def _record(self, num_seqs: int) -> tuple[Tensor, Tensor | None]:
        batch = self._inputs.batch(num_seqs)
        graph = ops.CPUGraph(self._graph_memory)
        try:
            with graph.capture():
                logits, drawn = self._compute(batch)
        except ops.GraphCaptureError as error:
            warnings.warn(f"decode steps run operator by operator, which is slower: {error}", stacklevel=2)
            self._max_recorded = 0
            return self._compute(batch)
        self._graphs[num_seqs] = graph, logits, drawn
        return logits, drawn
