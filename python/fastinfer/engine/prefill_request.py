"""Requests that generate nothing: they end when their prompt is computed."""

import torch

from fastinfer.engine.request import Request, SequenceStep
from fastinfer.engine.sequence import Sequence, SequenceOptions
from fastinfer.outputs import PrefillOutput
from fastinfer.sampling_params import SamplingParams


class PrefillRequest(Request):
    """Computes a prompt and generates nothing, as for a prompt module.

    Args:
        request_id: the engine's name for the request.
        prompt_token_ids: the prompt.
        owner: what the sequence shares with others of its owner.
        reads_prefix: whether computed blocks may come from the prefix cache.

    Attributes:
        request_id: the engine's name for the request.
        finish_reason: why it ended; ``None`` until then.
    """

    def __init__(
        self, request_id: str, prompt_token_ids: list[int], owner: SequenceOptions, *, reads_prefix: bool = True
    ) -> None:
        sequence = Sequence(
            request_id, prompt_token_ids, SamplingParams(), 0, samples=False, reads_prefix=reads_prefix, **owner
        )
        self.request_id = request_id
        self.sequences = [sequence]
        self.finish_reason: str | None = None
        self._stop_reason: int | str | None = None

    @property
    def unfinished(self) -> list[Sequence]:
        return self.sequences if self.finish_reason is None else []

    def update(self, step: SequenceStep) -> None:
        if step.is_last:
            self.finish("stop")

    def finish(self, reason: str, stop_reason: int | str | None = None) -> None:
        if self.finish_reason is None:
            self.finish_reason, self._stop_reason = reason, stop_reason

    def output(self) -> PrefillOutput | None:
        if self.finish_reason is None:
            return None
        prompt = list(self.sequences[0].token_ids)
        return PrefillOutput(self.request_id, prompt, self.finish_reason, self._stop_reason, self._embedding())

    def _embedding(self) -> list[float] | None:
        return None


class EmbeddingRequest(PrefillRequest):
    """Returns a prompt as a vector: the last token's hidden state after the last norm, or the mean over all tokens.

    A mean needs the hidden states of all tokens, which the prefix cache does not hold.

    Args:
        request_id, prompt_token_ids, owner: as for :class:`PrefillRequest`.
        pooling: ``"last"`` or ``"mean"``.
        normalize: whether to scale the vector to length 1.
    """

    def __init__(
        self, request_id: str, prompt_token_ids: list[int], owner: SequenceOptions, *, pooling: str, normalize: bool
    ) -> None:
        super().__init__(request_id, prompt_token_ids, owner, reads_prefix=pooling == "last")
        self._pooling = pooling
        self._normalize = normalize
        self._sum = torch.zeros(())
        self._num_summed = 0

    def update(self, step: SequenceStep) -> None:
        hidden = step.normalized()
        if step.start == 0 or self._pooling == "last":  # a preemption begins anew
            self._sum, self._num_summed = torch.zeros(hidden.shape[1], dtype=torch.float64), 0
        pooled = hidden[-1:] if self._pooling == "last" else hidden
        self._sum = self._sum + pooled.cpu().double().sum(0)
        self._num_summed += len(pooled)
        super().update(step)

    def _embedding(self) -> list[float] | None:
        if self.finish_reason != "stop":
            return None
        vector = self._sum / self._num_summed
        return (torch.nn.functional.normalize(vector, dim=0) if self._normalize else vector).tolist()
