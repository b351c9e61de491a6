"""What computes the steps of one model: the model, its KV cache, and the runner on both."""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from fastinfer.engine.batch_inputs import BatchInputs, StepResult
from fastinfer.engine.chunk import Chunk
from fastinfer.engine.config import EngineConfig
from fastinfer.engine.kv_cache_size import KVCacheSize
from fastinfer.engine.logits_row import LogitsRow
from fastinfer.engine.runner import STEP, Runner
from fastinfer.engine.sampled_token import TokenLogprob, top_logprobs
from fastinfer.models import Model
from fastinfer.models.kv_cache import KVCache, num_blocks_for
from fastinfer.models.placed_decoder import PlacedDecoder
from fastinfer.parallel.group import Group
from fastinfer.parallel.sharded_adapters import ADAPTER, ShardedAdapterSlots

# Number of prompt tokens whose logits are computed at a time if their log-probabilities are requested: 12 MB for a
# vocabulary of 49k tokens.
PROMPT_LOGPROBS_ROWS = 64
# First words of the messages to the other ranks, beside STEP and ADAPTER.
COPY_BLOCKS, LOGITS, RELEASE, RESTORE = 1, 2, 4, 5
# Pairs of blocks in a message.
PAIRS_PER_MESSAGE = 1024


class Worker:
    """Owns a model, its KV cache and its runner, and computes all that the engine needs of the model.

    Args:
        config: configuration of the engine.
        model: the model.
        size: size of the KV cache, whose memory is uninitialised.
        with_adapters: whether tokens may have LoRA adapters.
        separates_roles: whether to compute prompts and generated tokens differently, see
            :mod:`fastinfer.engine.roles`.
        group: group of ranks that compute the model together; ``None`` for this process alone. Each rank has a worker;
            those of ranks other than 0 only :meth:`follow`.
        allocate: function that allocates the memory of inputs, see
            :class:`fastinfer.engine.batch_inputs.BatchInputs`; by default the group's, if there is one.
        layers: the model's layers among those of the whole model; ``None`` for all.
        drops_rows: whether layers that store nothing are computed for wanted rows alone.

    Attributes:
        device: device of the inputs and of the logits.
        kv_cache: the KV cache.
        on_result: function that gets the chunks and the result of each step before the next one overwrites it; ``None``
            for none.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: Model,
        size: KVCacheSize,
        *,
        with_adapters: bool = False,
        separates_roles: bool = False,
        group: Group | None = None,
        allocate: Callable[[int], np.ndarray] | None = None,
        layers: range | None = None,
        drops_rows: bool = True,
    ) -> None:
        self._config = config
        self.device = torch.device(config.device)
        self._size = size
        self._with_adapters = with_adapters
        self._separates_roles = separates_roles
        self._group = group
        self._drops_rows = drops_rows
        self._allocate_inputs = allocate if group is None else group.allocate_inputs
        self._hidden: Tensor | None = None  # of the last step, with several ranks
        self._model: Model | None = model
        self.kv_cache = KVCache.of_model(
            model.config,
            size.num_blocks,
            config.block_size,
            config.kv_cache_dtype,
            model.layer_devices if isinstance(model, PlacedDecoder) else config.device,
            group=size.group,
            num_states=size.num_states,
            state_dtype=model.dtype,
            with_bounds=config.sparse_attention is not None,
            layers=layers,
        )
        self.on_result: Callable[[list[Chunk], StepResult], None] | None = None
        self._num_eager_steps = 0  # of released runners
        self._runner: Runner | None = self._make_runner()

    @property
    def model(self) -> Model:
        """The model, which must not have been released."""
        assert self._model is not None, "the model was released"
        return self._model

    @property
    def has_model(self) -> bool:
        """Whether there is a model, see :meth:`release`."""
        return self._model is not None

    @property
    def runner(self) -> Runner:
        """The runner, which must not have been released."""
        assert self._runner is not None, "the runner was released"
        return self._runner

    @property
    def num_eager_steps(self) -> int:
        """Number of steps that ran operator by operator since the start."""
        return self._num_eager_steps + (self._runner.num_eager_steps if self._runner else 0)

    @property
    def num_failed_graphs(self) -> int:
        """Number of steps that could not be recorded as a graph."""
        return len(self._runner.graphs.failed) if self._runner and self._runner.graphs else 0

    def run(self, chunks: list[Chunk], rows: list[LogitsRow], drawn: Tensor | None = None) -> StepResult:
        """Compute a step's chunks, see :meth:`fastinfer.engine.runner.Runner.__call__`."""
        result = self.runner(chunks, rows, drawn)
        if self._group is not None:
            self._hidden = result.hidden
        if self.on_result is not None:
            self.on_result(chunks, result)
        return result

    def follow(self) -> None:
        """Wait for a message of rank 0, and carry it out.

        Raises:
            RuntimeError: the group was aborted, or the ranks disagree.
        """
        assert self._group is not None
        kind, *words = self._group.receive()
        if kind == STEP:
            self._hidden = self.runner.follow(words).hidden
        elif kind == COPY_BLOCKS:
            group, *blocks = words
            self.kv_cache.copy_blocks(copied_pairs(blocks), group)
        elif kind == RELEASE:
            self._free()
        elif kind == RESTORE:
            self._restore()
        elif kind == ADAPTER:
            assert isinstance(self.model.adapters, ShardedAdapterSlots)
            self.model.adapters.follow(words)
        else:
            assert kind == LOGITS
            assert self._hidden is not None
            first, count, adapter = words
            rows = torch.arange(first, first + count)
            self.model.logits(self._hidden, rows, _adapter_ids(rows, adapter))
        self._group.finish()

    def copy_blocks(self, pairs: list[tuple[int, int]], group: int) -> None:
        """Copy blocks of a group of layers, see :meth:`fastinfer.models.kv_cache.KVCache.copy_blocks`."""
        if self._group is not None:
            with self._group.together():
                for message in copy_messages(pairs, group):
                    self._group.send(message)
        self.kv_cache.copy_blocks(pairs, group)

    def prompt_logprobs(
        self, hidden: Tensor, token_ids: list[int], count: int, adapter: int
    ) -> list[list[TokenLogprob]]:
        """Compute the log-probabilities of tokens of a prompt, and of the likeliest tokens in their places.

        Args:
            hidden: [n, hidden] hidden states of a step at the tokens before them.
            token_ids: the n tokens.
            count: number of likeliest tokens.
            adapter: slot of the LoRA adapter; -1 for none.

        Returns:
            For each token what :func:`fastinfer.engine.sampled_token.top_logprobs` returns.
        """
        logprobs = []
        for begin in range(0, len(token_ids), PROMPT_LOGPROBS_ROWS):
            part = token_ids[begin : begin + PROMPT_LOGPROBS_ROWS]
            rows = torch.arange(begin, begin + len(part), device=hidden.device)
            logits = self._logits(hidden, rows, adapter).float()
            logprobs += [top_logprobs(row, token_id, count) for row, token_id in zip(logits, part, strict=True)]
        return logprobs

    def sum_hidden(self, hidden: Tensor) -> Tensor:
        """Return the sum of hidden states of a step after the last norm.

        Args:
            hidden: [n, hidden] the hidden states.

        Returns:
            [hidden] float64, in host memory.
        """
        return self.model.normalize(hidden).cpu().double().sum(0)

    def _logits(self, hidden: Tensor, rows: Tensor, adapter: int) -> Tensor:
        """Compute logits for rows of hidden states of the last step, with all ranks."""
        adapter_ids = _adapter_ids(rows, adapter)
        if self._group is None:
            return self.model.logits(hidden, rows, adapter_ids)
        assert self._hidden is not None
        # The other ranks have the same hidden states of the whole step, of which these are consecutive rows.
        first = (hidden.data_ptr() - self._hidden.data_ptr()) // (hidden.shape[1] * hidden.itemsize)
        with self._group.together():
            self._group.send([LOGITS, first + int(rows[0]), len(rows), adapter])
            return self.model.logits(hidden, rows, adapter_ids)

    def release(self, *, with_model: bool) -> None:
        """Free the KV cache and the runner with its recorded graphs, and the model if wanted."""
        if self._group is not None:
            with self._group.together():
                self._group.send([RELEASE])
        self._free()
        if with_model:
            self._model = None

    def reload(self, model: Model) -> None:
        """Set the model again after it was released."""
        self._model = model

    def restore(self) -> None:
        """Allocate the KV cache again after :meth:`release`, and on a GPU capture the graphs again."""
        if self._group is not None:
            with self._group.together():
                self._group.send([RESTORE])
        self._restore()

    def _free(self) -> None:
        self._num_eager_steps = self.num_eager_steps
        self._runner = self._hidden = None
        self.kv_cache.free()

    def _restore(self) -> None:
        self.kv_cache.allocate()
        self._runner = self._make_runner()

    def _make_runner(self) -> Runner:
        """Make a runner whose inputs are large enough for any step; on a GPU this captures its graphs."""
        config = self._config
        inputs = BatchInputs(
            # The padding of a decode step adds one sequence per padding token.
            max_seqs=config.max_num_seqs * (1 + config.num_speculative_tokens),
            max_tokens=config.max_num_batched_tokens,
            max_logits=config.max_num_rows,
            max_blocks=num_blocks_for(self._size.max_model_len, config.block_size),
            block_size=config.block_size,
            num_groups=len(self._size.windows),
            device=config.device,
            has_states=self.model.config.states is not None,
            sparse_pages=config.sparse_pages,
            drops_rows=self._drops_rows and self.model.config.num_storing_layers < self.model.config.num_layers,
            has_features=self.model.config.has_features,
            allocate=self._allocate_inputs,
        )
        return Runner(
            self.model,
            self.kv_cache,
            inputs,
            # A graph is recorded for one device.
            enforce_eager=config.enforce_eager or isinstance(self.model, PlacedDecoder),
            with_adapters=self._with_adapters,
            deterministic=config.deterministic,
            separates_roles=self._separates_roles,
            group=self._group,
        )


def copy_messages(pairs: list[tuple[int, int]], group: int) -> Iterator[list[int]]:
    """Generate the messages to other ranks about pairs of blocks to be copied, in a group of layers."""
    for begin in range(0, len(pairs), PAIRS_PER_MESSAGE):
        yield [COPY_BLOCKS, group, *(block for pair in pairs[begin : begin + PAIRS_PER_MESSAGE] for block in pair)]


def copied_pairs(blocks: list[int]) -> list[tuple[int, int]]:
    """Return the pairs of blocks in such a message, given what follows the group."""
    return list(zip(blocks[::2], blocks[1::2], strict=True))


def _adapter_ids(rows: Tensor, adapter: int) -> Tensor | None:
    """Return the slot of the adapter that all rows have; ``None`` for none, which is -1."""
    return torch.full_like(rows, adapter, dtype=torch.int32) if adapter >= 0 else None
