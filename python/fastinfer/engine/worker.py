"""Worker that computes the steps of one model: it has the model, its KV cache, and the runners on both."""

from collections.abc import Callable
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from fastinfer.engine.batch_inputs import BatchInputs, StepResult
from fastinfer.engine.chunk import Chunk
from fastinfer.engine.config import EngineConfig
from fastinfer.engine.kv_cache_size import KVCacheSize
from fastinfer.engine.logits_row import LogitsRow
from fastinfer.engine.runner import Runner
from fastinfer.engine.sampled_token import TokenLogprob, top_logprobs
from fastinfer.models import Model
from fastinfer.models.kv_cache import KVCache, num_blocks_for
from fastinfer.models.placed_decoder import PlacedDecoder

# Number of prompt tokens whose logits are computed at a time if their log-probabilities are requested: 12 MB for a
# vocabulary of 49k tokens.
PROMPT_LOGPROBS_ROWS = 64


class CachePart(IntEnum):
    """A part of a model's caches that stores beyond them keep as one: a block of keys and values, or a slot of states.

    Ranks send its number.
    """

    BLOCK = 0
    STATES = 1


class Worker:
    """Owns a model, its KV cache and its runners, and computes all that the engine needs of the model.

    Args:
        config: configuration of the engine.
        model: the model.
        size: size of the KV cache, whose memory is uninitialised.
        with_adapters: whether tokens may have LoRA adapters.
        separates_roles: whether to compute prompts and generated tokens differently, see
            :mod:`fastinfer.engine.roles`.
        allocate: function that allocates the memory of inputs, see
            :class:`fastinfer.engine.batch_inputs.BatchInputs`; ``None`` for memory of this process.
        num_slots: number of steps that may be in flight, each of which has inputs and a runner of its own.
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
        allocate: Callable[[int], np.ndarray] | None = None,
        num_slots: int = 1,
        layers: range | None = None,
        drops_rows: bool = True,
    ) -> None:
        self._config = config
        self.device = torch.device(config.device)
        self._size = size
        self._with_adapters = with_adapters
        self._separates_roles = separates_roles
        self._drops_rows = drops_rows
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
            with_key_codes=config.sparse_attention is not None,
            layers=layers,
        )
        self.on_result: Callable[[list[Chunk], StepResult], None] | None = None
        self._num_eager_steps = 0  # of released runners
        self._inputs = [self._make_inputs(allocate) for _ in range(num_slots)]
        self._runners = [self._make_runner(inputs) for inputs in self._inputs]

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
        """The first runner, which must not have been released."""
        assert self._runners, "the runners were released"
        return self._runners[0]

    @property
    def num_eager_steps(self) -> int:
        """Number of steps that ran operator by operator since the start."""
        return self._num_eager_steps + sum(runner.num_eager_steps for runner in self._runners)

    @property
    def num_failed_graphs(self) -> int:
        """Number of steps that could not be recorded as a graph."""
        return sum(len(runner.graphs.failed) for runner in self._runners if runner.graphs)

    def run(self, chunks: list[Chunk], rows: list[LogitsRow], drawn: Tensor | None = None) -> StepResult:
        """Compute a step's chunks, see :meth:`fastinfer.engine.runner.Runner.__call__`."""
        result = self.runner(chunks, rows, drawn)
        self.report(chunks, result)
        return result

    def report(self, chunks: list[Chunk], result: StepResult) -> None:
        """Call ``on_result`` with a step's result, if there is such a function."""
        if self.on_result is not None:
            self.on_result(chunks, result)

    def copy_blocks(self, pairs: list[tuple[int, int]], group: int) -> None:
        """Copy blocks of a group of layers, see :meth:`fastinfer.models.kv_cache.KVCache.copy_blocks`."""
        self.kv_cache.copy_blocks(pairs, group)

    def part_bytes(self, part: CachePart) -> int:
        """Return the size of a part of the caches of all layers."""
        return sum(row.shape[1] for row in self._rows(part))

    def read_part(self, part: CachePart, index: int) -> Tensor:
        """Return a copy of a part of the caches of all layers, [part_bytes] uint8, on ``device``."""
        copies = [row[index].to(self.device) for row in self._rows(part)]
        return torch.cat(copies) if copies else torch.empty(0, dtype=torch.uint8, device=self.device)

    def write_part(self, part: CachePart, index: int, data: Tensor) -> None:
        """Fill a part of the caches of all layers with bytes that :meth:`read_part` has returned, on any device."""
        rows = self._rows(part)
        for row, values in zip(rows, data.to(self.device).split([row.shape[1] for row in rows]), strict=True):
            row[index].copy_(values)

    def _rows(self, part: CachePart) -> list[Tensor]:
        return self.kv_cache.rows if part is CachePart.BLOCK else self.kv_cache.state_rows

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
        """Compute logits for rows of hidden states of the last step."""
        return self.model.logits(hidden, rows, adapter_ids_of(rows, adapter))

    def release(self, *, with_model: bool) -> None:
        """Free the KV cache and the runners with their recorded graphs, and the model if wanted."""
        self._num_eager_steps = self.num_eager_steps
        self._runners = []
        self.kv_cache.free()
        if with_model:
            self._model = None

    def reload(self, model: Model) -> None:
        """Set the model again after it was released."""
        self._model = model

    def restore(self) -> None:
        """Allocate the KV cache again after :meth:`release`, and on a GPU capture the graphs again."""
        self.kv_cache.allocate()
        self._runners = [self._make_runner(inputs) for inputs in self._inputs]

    def _make_inputs(self, allocate: Callable[[int], np.ndarray] | None) -> BatchInputs:
        """Make inputs that are large enough for any step."""
        config, block = self._config, self.model.config.block
        has_windows = block is not None and any(self.model.config.windows) and not block.has_whole_windows
        return BatchInputs(
            # The padding of a decode step adds one sequence per padding token.
            max_seqs=config.max_num_seqs * (1 + config.num_speculative_tokens),
            max_tokens=config.max_num_batched_tokens,
            max_logits=config.max_num_rows,
            max_blocks=num_blocks_for(self._size.max_model_len, config.block_size),
            block_size=config.block_size,
            num_groups=len(self._size.windows),
            device=config.device,
            has_states=self.model.config.states is not None,
            sparse_attention=config.sparse_attention,
            sparse_prompts=config.sparse_prompts,
            drops_rows=self._drops_rows and self.model.config.num_storing_layers < self.model.config.num_layers,
            head_layers=self.model.config.num_layers if self.model.config.has_features else 0,
            has_window_lens=has_windows,
            has_block_places=block is not None and block.conv_taps > 0,
            allocate=allocate,
        )

    def _make_runner(self, inputs: BatchInputs) -> Runner:
        """Make a runner; on a GPU this captures its graphs."""
        config, block = self._config, self.model.config.block
        # A graph is recorded for one device. On a CPU it has operators alone, and these convolutions are none.
        is_eager = isinstance(self.model, PlacedDecoder) or (
            block is not None and block.conv_taps > 0 and self.device.type == "cpu"
        )
        return Runner(
            self.model,
            self.kv_cache,
            inputs,
            enforce_eager=config.enforce_eager or is_eager,
            with_adapters=self._with_adapters,
            deterministic=config.deterministic,
            separates_roles=self._separates_roles,
        )


def adapter_ids_of(rows: Tensor, adapter: int) -> Tensor | None:
    """Return the slot of the adapter that all rows have; ``None`` for none, which is -1."""
    return torch.full_like(rows, adapter, dtype=torch.int32) if adapter >= 0 else None
