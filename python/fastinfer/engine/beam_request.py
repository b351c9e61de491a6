"""Beam search: finds likely texts by keeping the best few in every step."""

import math
import time
from typing import NamedTuple

from fastinfer.engine.request import Request, SequenceStep
from fastinfer.engine.sampled_token import TokenLogprob
from fastinfer.engine.scheduler import Scheduler
from fastinfer.engine.sequence import Sequence, SequenceOptions
from fastinfer.outputs import CompletionOutput, RequestMetrics, RequestOutput
from fastinfer.sampling_params import MAX_LOGPROBS, BeamSearchParams, SamplingParams
from fastinfer.tokenizers.tokenizer import Tokenizer


class _Candidate(NamedTuple):
    """A beam extended by one token.

    Attributes:
        logprob: log-probability of the beam's generated tokens and the new one together.
        parent: the beam.
        token_id: the new token.
    """

    logprob: float
    parent: Sequence
    token_id: int


class _Hypothesis(NamedTuple):
    """A finished text.

    Attributes:
        score: log-probability with the length penalty applied; texts are ranked by it.
        logprob: log-probability of the generated tokens.
        token_ids: generated tokens.
        finish_reason: why the text ended.
        stop_reason: message of the error that cut the text short; ``None`` without one.
    """

    score: float
    logprob: float
    token_ids: list[int]
    finish_reason: str
    stop_reason: int | str | None = None


class BeamRequest(Request):
    """Searches for the likeliest continuations of one prompt.

    The rules are those of ``generate(num_beams=...)`` in transformers. A round begins when every beam has been
    computed. The likeliest next tokens of all beams compete, and the best ``beam_width`` texts become the next beams.
    Texts that end are set aside as hypotheses. The search ends when there are ``beam_width`` hypotheses and the best
    beam cannot become better than the worst of them.

    The first round starts from ``beam_width`` copies of the prompt. Only the first copy counts: the others have a
    log-probability of minus infinity.

    Args:
        request_id: id by which the engine knows the request.
        prompt_token_ids: the prompt.
        params: parameters of the search.
        options: arguments that all sequences of the request share.
        prompt: the prompt as text, for the output.
        tokenizer: tokenizer of the model.
        max_model_len: longest sequence in tokens.

    Attributes:
        request_id: id by which the engine knows the request.
        sequences: the current beams.
        finish_time: time at which the search ended, in seconds of ``time.perf_counter``; ``None`` until then.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: BeamSearchParams,
        options: SequenceOptions,
        *,
        prompt: str | None,
        tokenizer: Tokenizer,
        max_model_len: int,
    ) -> None:
        self._eos_ids = frozenset() if params.ignore_eos else tokenizer.eos_ids
        # Of the likeliest tokens of a beam, some may end the text; as many others as there are beams may go on.
        num_logprobs = min(params.beam_width + len(self._eos_ids), MAX_LOGPROBS)
        greedy = SamplingParams(temperature=0.0, max_tokens=params.max_tokens, logprobs=num_logprobs)
        max_length = min(max_model_len, len(prompt_token_ids) + params.max_tokens)
        first = Sequence(request_id, prompt_token_ids, greedy, 0, max_length=max_length, **options)
        first.may_speculate = False
        first.siblings = [first.copy() for _ in range(params.beam_width - 1)]
        self.request_id = request_id
        self.sequences = [first, *first.siblings]
        self.finish_time: float | None = None
        self._num_cached_tokens: int | None = None
        self._num_generated_tokens = 0
        self._params = params
        self._prompt = prompt
        self._prompt_token_ids = list(prompt_token_ids)
        self._tokenizer = tokenizer
        self._logprobs = {sequence: 0.0 if sequence is first else -float("inf") for sequence in self.sequences}
        self._next: dict[Sequence, list[TokenLogprob]] = {}
        self._ended: list[_Hypothesis] = []
        self._first = first
        self._first_token_time: float | None = None

    @property
    def unfinished(self) -> list[Sequence]:
        return self.sequences if self.finish_time is None else []

    @property
    def num_generated_tokens(self) -> int:
        """One for each beam and round, also those of beams that were given up."""
        return self._num_generated_tokens

    def update(self, step: SequenceStep) -> None:
        """Record a beam's likeliest next tokens; the beam then waits for the other beams."""
        if self._num_cached_tokens is None:
            self._num_cached_tokens = step.start
        if step.tokens:
            logprobs = step.tokens[0].logprobs
            assert logprobs is not None
            self._next[step.sequence] = logprobs
            self._num_generated_tokens += 1
            self._first_token_time = self._first_token_time or time.perf_counter()

    def end_step(self, scheduler: Scheduler) -> None:
        """Choose the next beams, once every beam has its likeliest next tokens."""
        if self.finish_time is not None or len(self._next) < len(self.sequences):
            return
        width = self._params.beam_width
        candidates = sorted(
            (
                _Candidate(self._logprobs[parent] + entry.logprob, parent, entry.token_id)
                for parent, entries in self._next.items()
                for entry in entries
                if self._logprobs[parent] + entry.logprob > -float("inf")  # neither a copy nor an impossible token
            ),
            key=lambda candidate: -candidate.logprob,
        )
        chosen = []
        for rank, candidate in enumerate(candidates):
            if candidate.token_id not in self._eos_ids:
                chosen.append(candidate)
            elif rank < width:
                self._end_with(candidate, "stop")
        chosen = chosen[:width]
        if len(self.sequences[0]) + 1 >= self.sequences[0].max_length:
            for candidate in chosen:
                self._end_with(candidate, "length")
            chosen = []
        self._rank()
        if not chosen or self._cannot_improve(chosen[0]):
            self.finish("stop")
        else:
            self._continue_with(chosen, scheduler)

    def finish(self, reason: str, stop_reason: int | str | None = None) -> None:
        """End the search unless it has ended; if it is cut short, the best current beams are added to its texts.

        The texts are then fewer than ``beam_width`` if the search has not found that many.
        """
        if self.finish_time is None:
            self.finish_time = time.perf_counter()
            if reason != "stop":
                num_missing = self._params.beam_width - len(self._ended)
                beams = [(logprob, s) for s, logprob in self._logprobs.items() if logprob > -float("inf")]
                beams.sort(key=lambda beam: -beam[0])
                for logprob, sequence in beams[:num_missing]:
                    self._end(logprob, sequence.output_token_ids, reason, stop_reason)
                self._rank()

    def output(self) -> RequestOutput | None:
        """Return the best texts, best first; ``None`` during the search, as the best ones may still change."""
        if self.finish_time is None:
            return None
        return self._output([self._completion(*pair) for pair in enumerate(self._ended)], self.finish_time)

    def failure(self, message: str) -> RequestOutput:
        width = self._params.beam_width
        failed = [CompletionOutput(index, "", [], "error", message, None, "") for index in range(width)]
        return self._output(failed, time.perf_counter())

    def _output(self, outputs: list[CompletionOutput], finish_time: float) -> RequestOutput:
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=outputs,
            finished=True,
            metrics=RequestMetrics(
                self._first.arrival_time, self._first.first_scheduled_time, self._first_token_time, finish_time
            ),
            num_cached_tokens=self._num_cached_tokens or 0,
        )

    def _continue_with(self, chosen: list[_Candidate], scheduler: Scheduler) -> None:
        """Make the chosen candidates the next beams.

        A beam continues with its best candidate, is forked for each further one, and ends if it has none.
        """
        following: dict[Sequence, list[_Candidate]] = {}
        for candidate in chosen:
            following.setdefault(candidate.parent, []).append(candidate)
        for sequence in self.sequences:
            if sequence not in following:
                scheduler.finish(sequence)
        logprobs: dict[Sequence, float] = {}
        for parent, candidates in following.items():
            beams = [parent, *(parent.copy() for _ in candidates[1:])]
            for child in beams[1:]:
                scheduler.fork(parent, child)
            for beam, candidate in zip(beams, candidates, strict=True):
                beam.append(candidate.token_id)
                logprobs[beam] = candidate.logprob
            scheduler.resume(parent)
        self.sequences, self._logprobs, self._next = list(logprobs), logprobs, {}

    def _end_with(self, candidate: _Candidate, reason: str) -> None:
        """Set a candidate aside as a finished text."""
        self._end(candidate.logprob, [*candidate.parent.output_token_ids, candidate.token_id], reason)

    def _end(self, logprob: float, token_ids: list[int], reason: str, stop_reason: int | str | None = None) -> None:
        """Set a text aside as a hypothesis."""
        score = self._score(logprob, max(len(token_ids), 1))  # a search that is cut short may not have a token yet
        self._ended.append(_Hypothesis(score, logprob, token_ids, reason, stop_reason))

    def _rank(self) -> None:
        """Sort the hypotheses, and keep the best ``beam_width``."""
        self._ended = sorted(self._ended, key=lambda hypothesis: -hypothesis.score)[: self._params.beam_width]

    def _score(self, logprob: float, length: int) -> float:
        return logprob / math.pow(length, self._params.length_penalty)

    def _cannot_improve(self, best: _Candidate) -> bool:
        """Return whether the best beam cannot become better than the worst hypothesis."""
        if len(self._ended) < self._params.beam_width:
            return False
        return self._ended[-1].score >= self._score(best.logprob, best.parent.num_output_tokens + 1)

    def _completion(self, index: int, hypothesis: _Hypothesis) -> CompletionOutput:
        tokens = hypothesis.token_ids
        text = self._tokenizer.decode(tokens[:-1] if tokens and tokens[-1] in self._eos_ids else tokens)
        return CompletionOutput(
            index=index,
            text=text,
            token_ids=tokens,
            finish_reason=hypothesis.finish_reason,
            stop_reason=hypothesis.stop_reason,
            logprobs=None,
            delta=text,
            cumulative_logprob=hypothesis.logprob,
        )
