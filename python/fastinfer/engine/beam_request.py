"""Beam search: the likeliest texts found by always keeping the best few."""

import math
import time
from typing import NamedTuple

from fastinfer.engine.request import Request, SequenceStep
from fastinfer.engine.sampled_token import TokenLogprob
from fastinfer.engine.scheduler import Scheduler
from fastinfer.engine.sequence import Sequence, SequenceOptions
from fastinfer.outputs import CompletionOutput, RequestMetrics, RequestOutput
from fastinfer.sampling_params import BeamSearchParams, SamplingParams
from fastinfer.tokenizers.tokenizer import Tokenizer


class _Candidate(NamedTuple):
    """A beam and a token after it, with the log-probability of all of it."""

    logprob: float
    parent: Sequence
    token_id: int


class _Hypothesis(NamedTuple):
    """A text that has ended."""

    score: float
    logprob: float
    token_ids: list[int]
    finish_reason: str


class BeamRequest(Request):
    """Searches for the likeliest continuations of one prompt.

    All beams advance in the same step. In each round every beam's likeliest tokens compete, and the best ``beam_width``
    texts become the next beams. Texts that end are kept aside. The search is over when the best beam cannot become
    better than the worst of ``beam_width`` texts that have ended: the rules of transformers'
    ``generate(num_beams=...)``. The first round has one beam in many copies, of which only the first counts.

    Args:
        request_id: the engine's name for the request.
        prompt_token_ids: the prompt.
        params: how to search.
        owner: what the sequences share with others of their owner.
        prompt: the prompt as text, for the output.
        tokenizer: turns tokens into text.
        max_model_len: tokens of the longest sequence.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: BeamSearchParams,
        owner: SequenceOptions,
        *,
        prompt: str | None,
        tokenizer: Tokenizer,
        max_model_len: int,
    ) -> None:
        greedy = SamplingParams(temperature=0.0, max_tokens=params.max_tokens, logprobs=2 * params.beam_width)
        max_length = min(max_model_len, len(prompt_token_ids) + params.max_tokens)
        first = Sequence(request_id, prompt_token_ids, greedy, 0, max_length=max_length, **owner)
        first.may_speculate = False
        first.siblings = [first.copy() for _ in range(params.beam_width - 1)]
        self.request_id = request_id
        self.sequences = [first, *first.siblings]
        self.finish_time: float | None = None
        self._num_cached_tokens: int | None = None
        self._params = params
        self._prompt = prompt
        self._prompt_token_ids = list(prompt_token_ids)
        self._tokenizer = tokenizer
        self._eos_ids = frozenset() if params.ignore_eos else tokenizer.eos_ids
        self._logprobs = {sequence: 0.0 if sequence is first else -float("inf") for sequence in self.sequences}
        self._next: dict[Sequence, list[TokenLogprob]] = {}
        self._ended: list[_Hypothesis] = []
        self._stop_reason: int | str | None = None
        self._arrival_time = first.arrival_time
        self._first_token_time: float | None = None

    @property
    def unfinished(self) -> list[Sequence]:
        return self.sequences if self.finish_time is None else []

    def update(self, step: SequenceStep) -> None:
        """Note a beam's likeliest next tokens; the beam waits for the others then."""
        if self._num_cached_tokens is None:
            self._num_cached_tokens = step.start
        if step.tokens:
            logprobs = step.tokens[0].logprobs
            assert logprobs is not None
            self._next[step.sequence] = logprobs
            self._first_token_time = self._first_token_time or time.perf_counter()

    def end_step(self, scheduler: Scheduler) -> None:
        """Once all beams have their next tokens, choose the next beams."""
        if self.finish_time is not None or len(self._next) < len(self.sequences):
            return
        width = self._params.beam_width
        candidates = sorted(
            (
                _Candidate(self._logprobs[parent] + entry.logprob, parent, entry.token_id)
                for parent, entries in self._next.items()
                for entry in entries
                if self._logprobs[parent] > -float("inf")
            ),
            key=lambda candidate: -candidate.logprob,
        )[: 2 * width]
        chosen = []
        for rank, candidate in enumerate(candidates):
            if candidate.token_id not in self._eos_ids:
                chosen.append(candidate)
            elif rank < width:
                self._end(candidate, "stop")
        chosen = chosen[:width]
        if len(self.sequences[0]) + 1 >= self.sequences[0].max_length:
            for candidate in chosen:
                self._end(candidate, "length")
            chosen = []
        self._ended = sorted(self._ended, key=lambda hypothesis: -hypothesis.score)[:width]
        if not chosen or self._cannot_improve(chosen[0]):
            self.finish("stop")
        else:
            self._go_on(chosen, scheduler)

    def finish(self, reason: str, stop_reason: int | str | None = None) -> None:
        """End the search with what it has; the second time does nothing."""
        if self.finish_time is None:
            self.finish_time = time.perf_counter()
            if reason != "stop":
                self._stop_reason = stop_reason
                for sequence in self.sequences[: self._params.beam_width - len(self._ended)]:
                    logprob = self._logprobs[sequence]
                    self._ended.append(_Hypothesis(-float("inf"), logprob, sequence.output_token_ids, reason))

    def output(self) -> RequestOutput | None:
        """The best texts, the best one first; while the search runs nothing, as the best may still change."""
        if self.finish_time is None:
            return None
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=[self._completion(*pair) for pair in enumerate(self._ended)],
            finished=True,
            metrics=RequestMetrics(self._arrival_time, self._first_token_time, self.finish_time),
            num_cached_tokens=self._num_cached_tokens or 0,
        )

    def _go_on(self, chosen: list[_Candidate], scheduler: Scheduler) -> None:
        """Each beam goes on with its best token, copies of it with the others, and beams without any end."""
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

    def _end(self, candidate: _Candidate, reason: str) -> None:
        tokens = [*candidate.parent.output_token_ids, candidate.token_id]
        score = self._score(candidate.logprob, len(tokens))
        self._ended.append(_Hypothesis(score, candidate.logprob, tokens, reason))

    def _score(self, logprob: float, length: int) -> float:
        return logprob / math.pow(length, self._params.length_penalty)

    def _cannot_improve(self, best: _Candidate) -> bool:
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
            stop_reason=self._stop_reason,
            logprobs=None,
            delta=text,
            cumulative_logprob=hypothesis.logprob,
        )
