"""Outputs of requests."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one candidate token at one position.

    Attributes:
        logprob: natural logarithm of the token's probability under the unmodified logits.
        rank: 1 for the most likely token at this position.
        decoded_token: the token as text; bytes that are not UTF-8 by themselves are U+FFFD.
        token_bytes: the token's own bytes, which may be a part of a character.
    """

    logprob: float
    rank: int
    decoded_token: str
    token_bytes: bytes


# A place in a transcript: the number of bytes of text and of tokens before it. Positions and excerpts are plain tuples,
# because a step makes many.
Position = tuple[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class Transcript:
    """Everything that was generated for one completion. All parts only grow at their ends.

    Outputs refer to the transcript instead of copying it, so that making one costs the same at any length.

    Attributes:
        token_ids: prompt, then generated tokens.
        num_prompt_tokens: length of the prompt in tokens.
        utf8: the text in UTF-8, without text that is held back.
        logprobs: one dictionary per generated token; ``None`` unless requested.
    """

    token_ids: list[int]
    num_prompt_tokens: int
    utf8: bytearray
    logprobs: list[dict[int, Logprob]] | None = None

    @property
    def end(self) -> Position:
        """The present end."""
        return len(self.utf8), len(self.token_ids) - self.num_prompt_tokens


# The part of a transcript that an output shows: the transcript, the beginning of the output's text and tokens, the end
# of the request's previous output, and the end of this one.
Excerpt = tuple[Transcript, Position, Position, Position]


def _text(transcript: Transcript, start: Position, since: Position, end: Position) -> str:
    return transcript.utf8[start[0] : end[0]].decode()


def _delta(transcript: Transcript, start: Position, since: Position, end: Position) -> str:
    return transcript.utf8[since[0] : end[0]].decode()


def _token_ids(transcript: Transcript, start: Position, since: Position, end: Position) -> list[int]:
    first = transcript.num_prompt_tokens
    return transcript.token_ids[first + start[1] : first + end[1]]


def _logprobs(
    transcript: Transcript, start: Position, since: Position, end: Position
) -> list[dict[int, Logprob]] | None:
    return None if transcript.logprobs is None else transcript.logprobs[start[1] : end[1]]


_READERS: dict[str, Callable[[Transcript, Position, Position, Position], Any]] = {
    "text": _text,
    "delta": _delta,
    "token_ids": _token_ids,
    "logprobs": _logprobs,
}


class _Excerpted:
    """Base of outputs whose text, tokens and log-probabilities are read from an excerpt when first used."""

    __slots__ = ("_excerpt",)
    _excerpt: Excerpt

    if not TYPE_CHECKING:  # a type checker would take every misspelt attribute for one of these

        def __getattr__(self, name: str) -> Any:
            """Read an attribute that is not set yet from the excerpt, and keep it."""
            if (read := _READERS.get(name)) is None:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            value = read(*self._excerpt)
            setattr(self, name, value)
            return value


@dataclass(slots=True)  # not frozen, as a step makes many, and freezing takes two thirds of the time to make one
class CompletionOutput(_Excerpted):
    """One completion of a prompt, as far as it has been generated.

    In outputs of an engine ``text``, ``delta``, ``token_ids`` and ``logprobs`` are copied when they are first read:
    reading all of a cumulative output takes time in proportion to its length.

    Attributes:
        index: number of the completion among the ``n`` completions of its prompt, from 0.
        text: all text so far, or with ``RequestOutputKind.DELTA`` the same as ``delta``. While the request runs, text
            that may turn into a stop string is held back.
        token_ids: all generated tokens so far, including the token that ended the text; with
            ``RequestOutputKind.DELTA`` those that are new since the request's previous output.
        finish_reason: ``None`` while the request runs; then ``"stop"`` (end of sequence, stop token or stop string),
            ``"length"`` (``max_tokens`` or the context length), ``"abort"``, ``"timeout"`` or ``"error"``.
        stop_reason: the stop string or stop token id that ended the text, ``None`` for end of sequence; the message if
            ``finish_reason`` is ``"error"``; ``"timeout"`` or ``"queue_timeout"`` if it is ``"timeout"``.
        logprobs: one dictionary per token in ``token_ids``, from token id to :class:`Logprob`; ``None`` unless
            requested.
        delta: text that is new since the request's previous output.
        cumulative_logprob: sum of the log-probabilities of all tokens; ``None`` unless ``logprobs`` or a beam search
            was requested.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None
    logprobs: list[dict[int, Logprob]] | None
    delta: str
    cumulative_logprob: float | None = None

    @classmethod
    def of(
        cls,
        excerpt: Excerpt,
        index: int,
        finish_reason: str | None,
        stop_reason: int | str | None,
        cumulative_logprob: float | None,
    ) -> "CompletionOutput":
        """Return the output that shows an excerpt; its length does not matter to the time that this takes."""
        output = object.__new__(cls)
        output._excerpt = excerpt  # type: ignore[misc]  # mypy misses the slots of the base class
        output.index = index
        output.finish_reason = finish_reason
        output.stop_reason = stop_reason
        output.cumulative_logprob = cumulative_logprob
        return output

    def complete(self) -> "CompletionOutput":
        """Return this output of an engine with everything since the request began."""
        transcript, _, _, end = self._excerpt
        excerpt = transcript, (0, 0), (0, 0), end
        return self.of(excerpt, self.index, self.finish_reason, self.stop_reason, self.cumulative_logprob)

    def merge(self, missed: "CompletionOutput") -> "CompletionOutput":
        """Return this output of an engine with what an earlier one, which nobody has read, contained."""
        transcript, start, _, end = self._excerpt
        _, missed_start, missed_since, _ = missed._excerpt
        excerpt = transcript, min(start, missed_start), missed_since, end
        return self.of(excerpt, self.index, self.finish_reason, self.stop_reason, self.cumulative_logprob)


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times of a request in seconds of ``time.perf_counter``; ``None`` for an event that has not happened yet.

    Attributes:
        arrival_time: the request was added to the engine.
        first_scheduled_time: the first step that computed some of its prompt began.
        first_token_time: the first token was drawn.
        finish_time: the request ended.
    """

    arrival_time: float
    first_scheduled_time: float | None
    first_token_time: float | None
    finish_time: float | None

    @property
    def queue_time(self) -> float | None:
        """Seconds that the request waited before its first step; ``None`` while it waits."""
        return None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time


@dataclass(slots=True)  # not frozen, for the same reason
class RequestOutput:
    """State of a request after an engine step.

    Attributes:
        request_id: the engine's name for the request.
        prompt: the prompt as text, ``None`` if it was given as token ids.
        prompt_token_ids: the token ids of the prompt.
        outputs: one :class:`CompletionOutput` for each of the ``n`` completions.
        finished: whether this is the request's last output.
        metrics: times of arrival, first token and end.
        prompt_logprobs: one dictionary per prompt token, from token id to :class:`Logprob`, with ``None`` for the first
            token; ``None`` unless requested.
        num_cached_tokens: number of prompt tokens found in the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PrefillOutput:
    """The only output of a request that generates no text.

    Attributes:
        request_id: the engine's name for the request.
        prompt_token_ids: the token ids of the prompt.
        finish_reason: ``"stop"`` on success, else ``"abort"``, ``"timeout"`` or ``"error"``.
        stop_reason: the message if ``finish_reason`` is ``"error"``; the limit if it is ``"timeout"``.
        embedding: [hidden] numbers; ``None`` unless an embedding was requested and succeeded.
    """

    request_id: str
    prompt_token_ids: list[int]
    finish_reason: str
    stop_reason: int | str | None = None
    embedding: list[float] | None = None

    @property
    def finished(self) -> bool:
        """Always True, because there is only one output."""
        return True


Output = TypeVar("Output", RequestOutput, PrefillOutput)


def merge(missed: Output | None, output: Output) -> Output:
    """Return ``output`` with what ``missed`` contained, an earlier output of the same request that nobody has read.

    The time that this takes does not depend on the length of the outputs.
    """
    if not isinstance(missed, RequestOutput) or not isinstance(output, RequestOutput):
        return output
    pairs = zip(missed.outputs, output.outputs, strict=True)
    return replace(output, outputs=[new.merge(old) for old, new in pairs])


@dataclass(frozen=True, slots=True)
class ScoreOutput:
    """Log-likelihood of a text under a model.

    Attributes:
        prompt_token_ids: the token ids of the text, including its context.
        logprob: sum of the natural logarithms of the scored tokens' probabilities, each given all tokens before it.
        num_tokens: number of scored tokens; ``exp(-logprob / num_tokens)`` is their perplexity.
    """

    prompt_token_ids: list[int]
    logprob: float
    num_tokens: int
