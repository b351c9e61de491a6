"""Requests that generate no text and end when their prompt is computed: pinned prompts and embeddings."""

import torch

from fastinfer.engine.request import Request, SequenceStep
from fastinfer.engine.sequence import Sequence, SequenceOptions
from fastinfer.outputs import PrefillOutput
from fastinfer.sampling_params import SamplingParams


class PrefillRequest(Request):
    """Computes a prompt and generates no text; used as it is for pinned prompts.

    Args:
        request_id: id by which the engine knows the request.
        prompt_token_ids: the prompt.
        options: arguments of the request's sequence.
        reads_prefix: whether computed blocks of the prefix cache may be reused.

    Attributes:
        request_id: id by which the engine knows the request.
        finish_reason: why the request ended; ``None`` until then.
    """

    def __init__(
        self, request_id: str, prompt_token_ids: list[int], options: SequenceOptions, *, reads_prefix: bool = True
    ) -> None:
        sequence = Sequence(
            request_id, prompt_token_ids, SamplingParams(), 0, samples=False, reads_prefix=reads_prefix, **options
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

    def failure(self, message: str) -> PrefillOutput:
        return PrefillOutput(self.request_id, self.sequences[0].prompt_as_read, "error", message)

    def output(self) -> PrefillOutput | None:
        if self.finish_reason is None:
            return None
        prompt = self.sequences[0].prompt_as_read
        return PrefillOutput(self.request_id, prompt, self.finish_reason, self._stop_reason, self._embedding())

    def _embedding(self) -> list[float] | None:
        return None


class EmbeddingRequest(PrefillRequest):
    """Turns a prompt into one vector: the last token's hidden state after the last norm, or the mean over all tokens.

    With the mean the request does not read the prefix cache, which holds no hidden states.

    Args:
        request_id, prompt_token_ids, options: as for :class:`PrefillRequest`.
        pooling: ``"last"`` or ``"mean"``.
        normalize: whether to scale the vector to length 1.
    """

    def __init__(
        self, request_id: str, prompt_token_ids: list[int], options: SequenceOptions, *, pooling: str, normalize: bool
    ) -> None:
        super().__init__(request_id, prompt_token_ids, options, reads_prefix=pooling == "last")
        self.sequences[0].pooling = pooling
        self._divisor = len(prompt_token_ids) if pooling == "mean" else 1
        self._normalize = normalize
        self._pooled = torch.zeros(())

    def update(self, step: SequenceStep) -> None:
        if step.pooled is not None:
            before = 0 if step.start == 0 else self._pooled  # after a preemption the prompt is computed again
            self._pooled = before + step.pooled
        super().update(step)

    def _embedding(self) -> list[float] | None:
        if self.finish_reason != "stop":
            return None
        vector = self._pooled / self._divisor
        return (torch.nn.functional.normalize(vector, dim=0) if self._normalize else vector).tolist()
