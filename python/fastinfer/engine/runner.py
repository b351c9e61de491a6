"""Runs the model on the chunks of a step, by replaying a recorded graph where one exists for the size of the step."""

from collections.abc import Sequence

from torch import Tensor

from fastinfer import ops
from fastinfer.engine.batch_inputs import BatchInputs, BatchSize, StepResult
from fastinfer.engine.chunk import Chunk
from fastinfer.engine.cpu_graphs import CPUGraphs
from fastinfer.engine.cuda_graphs import CUDAGraphs, expert_tile_limits
from fastinfer.engine.halves import Halves
from fastinfer.engine.logits_row import LogitsRow
from fastinfer.models import Model
from fastinfer.models.batch import Batch
from fastinfer.models.kv_cache import KVCache
from fastinfer.ops.prompt import NO_ROW


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
        separates_roles: whether to tell the kernels which tokens are those of prompts, see
            :mod:`fastinfer.engine.roles`.

    Attributes:
        model, kv_cache, inputs: see above.
        graphs: recorded graphs; ``None`` with ``enforce_eager``.
        halves: computes some of the steps that are not recorded as two halves; ``None`` for none. Set by the worker of
            a rank.
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
        separates_roles: bool = False,
    ) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self.inputs = inputs
        self._enforce_eager = enforce_eager
        self._with_adapters = with_adapters
        self._always_adapters = with_adapters and deterministic
        self._separates_roles = separates_roles
        self.halves: Halves | None = None
        self.num_eager_steps = 0
        self.graphs = self._make_graphs()

    def __call__(self, chunks: list[Chunk], rows: list[LogitsRow], drawn: Tensor | None = None) -> StepResult:
        """Compute the chunks and store their keys and values in the blocks of their sequences.

        Args:
            chunks: chunks to compute; where roles are separated, those of prompts come last.
            rows: their rows of logits.
            drawn: [rows] int64 tokens of the last draw, on the device, if some chunks begin with tokens that the host
                does not know yet.
        """
        return self.run(*self.prepare(chunks, rows, drawn))

    def prepare(
        self, chunks: list[Chunk], rows: list[LogitsRow], drawn: Tensor | None = None
    ) -> tuple[BatchSize, bool]:
        """Write the inputs of a step, see :meth:`__call__`; return the arguments of :meth:`run`."""
        size = self.inputs.fill(chunks, rows, drawn)
        if self._always_adapters:
            size = size._replace(has_adapters=True)
        if self._separates_roles:
            size = _with_roles(size, chunks)
        return size, all(chunk.sequence.is_decoding for chunk in chunks)

    def description(self, size: BatchSize, is_decode: bool) -> list[int]:
        """Return what other ranks must know of a step whose inputs are written, for :meth:`follow`."""
        return [*size, is_decode, self.inputs.digest(size), *self.inputs.take_changes()]

    def follow(self, words: Sequence[int]) -> StepResult:
        """Compute the step that rank 0 has announced, whose inputs are in the memory that the ranks share.

        Args:
            words: the step's :meth:`description`.

        Raises:
            RuntimeError: the inputs are not those of the message.
        """
        num_fields = len(BatchSize._fields)
        num_seqs, num_tokens, num_logits, has_adapters, *others = words[:num_fields]
        is_decode, digest, *changes = words[num_fields:]
        size = BatchSize(num_seqs, num_tokens, num_logits, bool(has_adapters), *others)
        self.inputs.add_changes(changes)
        if (own := self.inputs.digest(size)) != digest:
            raise RuntimeError(f"the inputs of a step must have the digest {digest}, got {own}")
        return self.run(size, bool(is_decode))

    def run(self, size: BatchSize, is_decode: bool) -> StepResult:
        """Compute the batch that the inputs contain.

        Args:
            size: its sizes.
            is_decode: whether all sequences decode.
        """
        if self.graphs is not None and self.inputs.images is None:
            result = self.graphs.run(size, is_decode)
            if result is not None:
                return result
        self.num_eager_steps += 1
        self.inputs.upload()
        if self.inputs.has_unknown_tokens:
            self.inputs.insert_drawn(size.num_tokens)
        batch = self.inputs.batch(size)
        if self.halves is not None:
            hidden = self.halves.forward(batch, self.inputs.lengths(size.num_seqs), size.first_prompt_row)
            if hidden is not None:
                return StepResult(hidden, self._logits(hidden, batch), self.inputs.sampling)
        return self.compute(batch, size.first_prompt_row)

    def compute(self, batch: Batch, first_prompt_row: int = NO_ROW) -> StepResult:
        """Compute a batch by calling the model's operators one by one.

        Args:
            batch: the batch.
            first_prompt_row: see :class:`fastinfer.engine.batch_inputs.BatchSize`. It does not concern the logits:
                each row of them decides a generated token.
        """
        if first_prompt_row == NO_ROW:
            hidden = self._forward(batch)
        else:
            with ops.prompt_rows(first_prompt_row):
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


def _with_roles(size: BatchSize, chunks: list[Chunk]) -> BatchSize:
    """Return the size with the first rows of the prompts at the end of a batch, if there are any."""
    first, wanted = size.num_tokens, NO_ROW
    for chunk in reversed(chunks):
        if not chunk.is_prompt:
            break
        first -= chunk.num_tokens
        wanted = chunk.hidden_rows.start
    if first == size.num_tokens:
        return size
    return size._replace(first_prompt_row=first, first_wanted_prompt_row=wanted)
