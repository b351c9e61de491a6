"""Steps that are computed as two halves in turns, so that a GPU computes one while the other is exchanged.

Each half has its own stream and its own memory for exchanges. After a layer of the first half comes the same layer of
the second. All ranks launch in this order, and this is why they cannot wait for each other for ever, however GPUs run
the two streams: the kernels before the earliest exchange that has not ended have ended on all ranks, so each rank can
run it. That holds as long as what waits leaves room for what it waits for. An exchange has at most 64 blocks, each of
which waits for the same block of the other ranks alone. A kernel that was launched before the exchange in front of it
has ended (programmatic dependent launch) would take room without need, so there are none.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from fastinfer.models.batch import Batch
from fastinfer.models.decoder import Decoder
from fastinfer.models.kv_cache import KVCache
from fastinfer.ops.launches import no_dependent_launches
from fastinfer.ops.prompt import NO_ROW
from fastinfer.parallel.nano_batches import can_be_halved, halves_of


class Halves:
    """Computes the hidden states of steps as two halves, where that pays.

    Args:
        models: the model of each half: the same weights, on a GPU with different memory for exchanges.
        kv_cache: KV cache of the model.
        device: device of the model and the cache.
        choose: function that gets the numbers of tokens of a step's sequences, and returns the number of sequences of
            the first half, or ``None`` for a whole step; the same on all ranks.

    Attributes:
        num_steps: number of steps that were computed as halves since the start.
    """

    def __init__(
        self,
        models: tuple[Decoder, Decoder],
        kv_cache: KVCache,
        device: torch.device,
        choose: Callable[[Sequence[int]], int | None],
    ) -> None:
        self._models = models
        self._kv_cache = kv_cache
        self._choose = choose
        self._stream = torch.cuda.Stream() if device.type == "cuda" else None
        self.num_steps = 0

    @torch.inference_mode()
    def forward(self, batch: Batch, lengths: Sequence[int], first_prompt_row: int) -> Tensor | None:
        """Compute a step, see :meth:`fastinfer.models.decoder.Decoder.forward`.

        Args:
            batch: the batch.
            lengths: numbers of tokens of its sequences.
            first_prompt_row: see :class:`fastinfer.engine.batch_inputs.BatchSize`.

        Returns:
            [tokens, hidden]; ``None`` if the step must or should be computed as a whole. This alone decides it.
        """
        if first_prompt_row != NO_ROW or not can_be_halved(batch):
            return None
        count = self._choose(lengths)
        if count is None:
            return None
        self.num_steps += 1
        parts = halves_of(batch, count, sum(lengths[:count]))
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        pieces = [model.outputs(part, self._kv_cache) for model, part in zip(self._models, parts, strict=True)]
        hidden = [part.token_ids for part in parts]
        with no_dependent_launches():
            for _ in range(1 + len(self._models[0].layers)):
                for half, outputs in enumerate(pieces):
                    with self._on_stream(half):
                        hidden[half] = next(outputs)
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        return torch.cat(hidden)

    def _on_stream(self, half: int) -> AbstractContextManager[object]:
        """Return a context in which operators are launched on the stream of a half: of the first the current one."""
        return nullcontext() if self._stream is None or half == 0 else torch.cuda.stream(self._stream)
