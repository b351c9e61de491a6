"""Requests that generate text: one or more completions of a prompt."""

import secrets
import time

from fastinfer.engine.grammar import Grammar
from fastinfer.engine.request import Request, SequenceStep
from fastinfer.engine.sampled_token import SampledToken, TokenLogprob
from fastinfer.engine.sequence import Sequence, SequenceOptions
from fastinfer.engine.text_stream import TextStream
from fastinfer.engine.token_counts import TokenCounts
from fastinfer.engine.token_rules import TokenRules
from fastinfer.outputs import (
    CompletionOutput,
    Logprob,
    Position,
    RequestMetrics,
    RequestOutput,
    Transcript,
)
from fastinfer.sampling_params import RequestOutputKind, SamplingParams
from fastinfer.tokenizers.tokenizer import Detokenizer, Tokenizer
from fastinfer.utils.checks import INT64_MAX


class Completion:
    """Appends sampled tokens to one sequence, decides when it ends, and reports its text.

    Args:
        index: number of the completion among those of its request, from 0.
        sequence: the completion's sequence.
        tokenizer: tokenizer of the model.

    Attributes:
        sequence: the completion's sequence.
        finish_reason: why the completion ended, see :class:`fastinfer.outputs.CompletionOutput`; ``None`` until then.
    """

    def __init__(self, index: int, sequence: Sequence, tokenizer: Tokenizer) -> None:
        params = sequence.params
        self.sequence = sequence
        self.finish_reason: str | None = None
        self._index = index
        self._stop_reason: int | str | None = None
        self._tokenizer = tokenizer
        self._stop_ids = frozenset(params.stop_token_ids or ())
        self._eos_ids = frozenset() if params.ignore_eos else tokenizer.eos_ids
        detokenizer = Detokenizer(tokenizer, params.skip_special_tokens, params.kept_special_tokens or ())
        self._includes_stop = params.include_stop_str_in_output
        self._stream = TextStream(detokenizer, params.stop or (), self._includes_stop, params.min_tokens)
        logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self._transcript = Transcript(sequence.token_ids, sequence.num_prompt_tokens, self._stream.utf8, logprobs)
        self._cumulative_logprob = None if logprobs is None else 0.0
        self._end_is_reported = False
        self._is_delta = params.output_kind is RequestOutputKind.DELTA
        # Beginning of the text, end of the last output, and end of the last one that was reported.
        self._beginning = self._shown = self._reported = self._transcript.end

    def add(self, token: SampledToken) -> None:
        """Append a sampled token and the tokens that the grammar forces after it, up to one that ends the text."""
        self._append(token)
        if (grammar := self.sequence.grammar) is not None and self.finish_reason is None:
            self._follow(grammar, token.token_id)

    def _follow(self, grammar: Grammar, token_id: int) -> None:
        """Let the grammar accept a token that was appended, and append those that it forces after it."""
        grammar.accept(token_id)
        if self._transcript.logprobs is not None:
            # A token that is appended without a step has no log-probabilities, so these are drawn one by one.
            self.sequence.forced = self.sequence.forced[1:] if self.sequence.forced else grammar.forced_tokens()
        else:
            for forced in grammar.forced_tokens():
                self._append(SampledToken(forced))
                if self.finish_reason is not None:
                    return
                grammar.accept(forced)
        if grammar.finished:
            self._finish_text("stop")

    def finish(self, reason: str, stop_reason: int | str | None = None) -> None:
        """End the completion with its current text, unless it has ended; an error also replaces an unreported end."""
        if self.finish_reason is None or (reason == "error" and not self._end_is_reported):
            self.finish_reason = reason
            self._stop_reason = stop_reason

    def output(self) -> CompletionOutput:
        """Return the current state; its ``delta`` is the text that was added since the last reported output."""
        end = self._shown = self._transcript.end
        return self._output(end, self.finish_reason, self._stop_reason)

    def failure(self, message: str) -> CompletionOutput:
        """Return an output that reports an error, with the text of the last reported output."""
        return self._output(self._reported, "error", message)

    def mark_reported(self) -> None:
        """Let later deltas begin after the last output."""
        self._reported = self._shown
        self._end_is_reported = self.finish_reason is not None

    def _output(self, end: Position, finish_reason: str | None, stop_reason: int | str | None) -> CompletionOutput:
        since = self._reported
        excerpt = self._transcript, since if self._is_delta else self._beginning, since, end
        return CompletionOutput.of(excerpt, self._index, finish_reason, stop_reason, self._cumulative_logprob)

    def _append(self, token: SampledToken) -> None:
        """Append one token, and finish if it ends the text."""
        sequence, token_id = self.sequence, token.token_id
        sequence.append(token_id)
        if self._cumulative_logprob is not None and (logprobs := self._transcript.logprobs) is not None:
            assert token.logprobs is not None
            logprobs.append(decode_logprobs(token.logprobs, self._tokenizer))
            self._cumulative_logprob += token.logprobs[0].logprob
        if token_id in self._eos_ids:
            self._finish_text("stop")
        elif token_id in self._stop_ids:
            if self._includes_stop:
                self._stream.add(token_id)
            if self._stream.stopped_by is None:
                self._finish_text("stop", token_id)
            else:
                self.finish("stop", self._stream.stopped_by)
        else:
            self._stream.add(token_id)
            if self._stream.stopped_by is not None:
                self.finish("stop", self._stream.stopped_by)
            elif len(sequence.token_ids) >= sequence.max_length:
                self._finish_text("length")

    def _finish_text(self, reason: str, stop_reason: int | str | None = None) -> None:
        """Flush the text, which may complete a stop string, and end the completion."""
        self._stream.flush()
        if self._stream.stopped_by is not None:
            reason, stop_reason = "stop", self._stream.stopped_by
        self.finish(reason, stop_reason)


class GenerationRequest(Request):
    """Generates ``params.n`` completions of one prompt.

    The first sequence computes the prompt; the others wait as its siblings and share its blocks.

    Args:
        request_id: id by which the engine knows the request.
        prompt_token_ids: the prompt.
        params: sampling parameters, stop conditions included.
        options: arguments that all sequences of the request share.
        prompt: the prompt as text, for the outputs.
        tokenizer: tokenizer of the model.
        max_model_len: longest sequence in tokens.
        vocab_size: number of token ids of the model.

    Attributes:
        request_id: id by which the engine knows the request.
        finish_time: time at which the last completion ended, in seconds of ``time.perf_counter``; ``None`` until then.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        options: SequenceOptions,
        *,
        prompt: str | None,
        tokenizer: Tokenizer,
        max_model_len: int,
        vocab_size: int,
    ) -> None:
        self.request_id = request_id
        self.sequences = _sequences(request_id, prompt_token_ids, params, options, max_model_len, vocab_size)
        rules = TokenRules.of(params, tokenizer, vocab_size)
        for sequence in self.sequences:
            sequence.token_rules = rules
        self.finish_time: float | None = None
        self._num_cached_tokens: int | None = None  # prompt tokens that the prefix cache held
        self._params = params
        self._completions = {s: Completion(index, s, tokenizer) for index, s in enumerate(self.sequences)}
        self._unfinished = self.sequences
        self._prompt = prompt
        self._prompt_token_ids = self.sequences[0].prompt_as_read
        self._tokenizer = tokenizer
        self._prompt_logprobs: list[dict[int, Logprob] | None] = [None]
        self._first_token_time: float | None = None
        self._metrics: RequestMetrics | None = None

    @property
    def unfinished(self) -> list[Sequence]:
        return self._unfinished

    def update(self, step: SequenceStep) -> None:
        """Append a step's tokens to the sequence's completion, up to the token that ends it."""
        if self._num_cached_tokens is None:
            layout = step.sequence.layout
            self._num_cached_tokens = step.start if layout is None else layout.num_as_read(step.start)
        if self._params.prompt_logprobs is not None:
            self._add_prompt_logprobs(step)
        if step.tokens and self._first_token_time is None:
            self._first_token_time = time.perf_counter()
        completion = self._completions[step.sequence]
        for token in step.tokens:
            if completion.finish_reason is None:
                completion.add(token)
        if completion.finish_reason is not None:
            self._note_ends()

    def finish(self, reason: str, stop_reason: int | str | None = None) -> None:
        """End the completions that have not ended yet."""
        for completion in self._completions.values():
            completion.finish(reason, stop_reason)
        self._note_ends()

    def output(self) -> RequestOutput | None:
        """Return the current state, or ``None`` while only the final output is wanted."""
        if self.finish_time is None and self._params.output_kind is RequestOutputKind.FINAL_ONLY:
            return None
        return self._output([completion.output() for completion in self._completions.values()], self.finish_time)

    def failure(self, message: str) -> RequestOutput:
        outputs = [completion.failure(message) for completion in self._completions.values()]
        return self._output(outputs, time.perf_counter())

    def mark_reported(self) -> None:
        for completion in self._completions.values():
            completion.mark_reported()

    def _output(self, outputs: list[CompletionOutput], finish_time: float | None) -> RequestOutput:
        return RequestOutput(  # without names, which would take a fifth of the time to make it
            self.request_id,
            self._prompt,
            self._prompt_token_ids,
            outputs,
            finish_time is not None,
            self._times(finish_time),
            # Complete since the prompt was computed, before the first output.
            None if self._params.prompt_logprobs is None else self._prompt_logprobs,
            self._num_cached_tokens or 0,
        )

    def _times(self, finish_time: float | None) -> RequestMetrics:
        """Return the times so far; between the first token and the end they do not change."""
        if self._metrics is None or finish_time is not None:
            first = self.sequences[0]
            self._metrics = RequestMetrics(
                first.arrival_time, first.first_scheduled_time, self._first_token_time, finish_time
            )
        return self._metrics

    def _add_prompt_logprobs(self, step: SequenceStep) -> None:
        """Add the log-probabilities of the step's prompt tokens; after a preemption they are not computed again."""
        self._prompt_logprobs += [decode_logprobs(entries, self._tokenizer) for entries in step.prompt_logprobs]
        self.sequences[0].next_prompt_logprob = len(self._prompt_logprobs)

    def _note_ends(self) -> None:
        """Note which completions have ended, and the time at which the last one did."""
        self._unfinished = [s for s, completion in self._completions.items() if completion.finish_reason is None]
        if self.finish_time is None and not self._unfinished:
            self.finish_time = time.perf_counter()


def _sequences(
    request_id: str,
    prompt_token_ids: list[int],
    params: SamplingParams,
    options: SequenceOptions,
    max_model_len: int,
    vocab_size: int,
) -> list[Sequence]:
    """Make a sequence for each completion, with consecutive seeds."""
    layout = options["layout"]
    max_length = max_model_len - (0 if layout is None else max(layout.shift, 0))
    if params.max_tokens is not None:
        max_length = min(max_length, len(prompt_token_ids) + params.max_tokens)
    seed = secrets.randbits(63) if params.seed is None else params.seed
    sequences = [
        Sequence(
            request_id,
            prompt_token_ids,
            params,
            (seed + index) % (INT64_MAX + 1),
            max_length=max_length,
            reads_prefix=params.prompt_logprobs is None,  # the cache holds no logits
            **options,
        )
        for index in range(params.n)
    ]
    sequences[0].siblings = sequences[1:]
    if params.prompt_logprobs is not None:
        sequences[0].next_prompt_logprob = 1
    for sequence in sequences:
        sequence.runs_ahead = True
    if params.has_penalties:
        counts = TokenCounts(prompt_token_ids, vocab_size)
        for sequence in sequences:
            sequence.counts = counts.copy()
    return sequences


def decode_logprobs(entries: list[TokenLogprob], tokenizer: Tokenizer) -> dict[int, Logprob]:
    """Return the log-probabilities of one position with the tokens' texts, by token id."""
    decoded = {}
    for entry in entries:
        token_bytes = tokenizer.token_bytes(entry.token_id, skip_special_tokens=False)
        text = token_bytes.decode(errors="replace")
        decoded[entry.token_id] = Logprob(entry.logprob, entry.rank, text, token_bytes)
    return decoded
