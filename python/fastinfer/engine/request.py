"""A request: its sequence, and what the user sees of it."""

import time

from fastinfer.engine.sampler import SampledToken, TokenLogprob
from fastinfer.engine.sequence import Sequence
from fastinfer.engine.text_stream import TextStream
from fastinfer.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from fastinfer.tokenizer import Detokenizer, Tokenizer


class Request:
    """Takes in the sampled tokens of one sequence, decides when it ends, and reports.

    Attributes:
        sequence: what the scheduler works with.
        finish_reason: ``None`` while it runs, see :class:`fastinfer.outputs.CompletionOutput`.
    """

    def __init__(self, sequence: Sequence, prompt: str | None, tokenizer: Tokenizer, max_model_len: int) -> None:
        params = sequence.params
        self.sequence = sequence
        self.finish_reason: str | None = None
        self._stop_reason: int | str | None = None
        self._prompt = prompt
        self._prompt_token_ids = list(sequence.token_ids)
        self._tokenizer = tokenizer
        self._stop_ids = frozenset(params.stop_token_ids or ())
        self._max_length = max_model_len
        if params.max_tokens is not None:
            self._max_length = min(max_model_len, len(sequence) + params.max_tokens)
        self._eos_ids = frozenset() if params.ignore_eos else tokenizer.eos_ids
        self._stream = TextStream(Detokenizer(tokenizer, params.skip_special_tokens), params.stop or ())
        self._logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self._num_reported = 0  # characters of the text that an output has carried
        self._arrival_time = time.perf_counter()
        self._first_token_time: float | None = None
        self._finish_time: float | None = None

    def add(self, token: SampledToken) -> None:
        """Append a sampled token, and finish if it ends the request."""
        if self._first_token_time is None:
            self._first_token_time = time.perf_counter()
        self.sequence.token_ids.append(token.token_id)
        if self._logprobs is not None and token.logprobs is not None:
            self._logprobs.append({entry.token_id: self._decode(entry) for entry in token.logprobs})

        if token.token_id in self._eos_ids:
            self._finish_text("stop")
        elif token.token_id in self._stop_ids:
            self._finish_text("stop", token.token_id)
        else:
            self._stream.add(token.token_id)
            if self._stream.stopped_by is not None:
                self.finish("stop", self._stream.stopped_by)
            elif len(self.sequence) >= self._max_length:
                self._finish_text("length")

    def finish(self, reason: str, stop_reason: int | str | None = None) -> None:
        """End the request with the text as it was last given out."""
        self.finish_reason = reason
        self._stop_reason = stop_reason
        self._finish_time = time.perf_counter()

    def output(self) -> RequestOutput:
        """The state now; its ``delta`` is what came since the last call."""
        text = self._stream.text
        delta = text[self._num_reported :]
        self._num_reported = len(text)
        completion = CompletionOutput(
            index=0,
            text=text,
            token_ids=self.sequence.output_token_ids,
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
            logprobs=None if self._logprobs is None else list(self._logprobs),
            delta=delta,
        )
        return RequestOutput(
            request_id=self.sequence.request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=[completion],
            finished=self.finish_reason is not None,
            metrics=RequestMetrics(self._arrival_time, self._first_token_time, self._finish_time),
        )

    def _finish_text(self, reason: str, stop_reason: int | str | None = None) -> None:
        """End the request, and its text with what was held back, in which a stop string may still come to light."""
        self._stream.flush()
        if self._stream.stopped_by is not None:
            reason, stop_reason = "stop", self._stream.stopped_by
        self.finish(reason, stop_reason)

    def _decode(self, entry: TokenLogprob) -> Logprob:
        text = self._tokenizer.decode([entry.token_id], skip_special_tokens=False)
        return Logprob(entry.logprob, entry.rank, text)
