"""Outputs of requests."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one candidate token at one position.

    Attributes:
        logprob: natural logarithm of the token's probability under the unmodified logits.
        rank: 1 for the most likely token at this position.
        decoded_token: the token as text.
    """

    logprob: float
    rank: int
    decoded_token: str


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One completion of a prompt, as far as it has been generated.

    Attributes:
        index: number of the completion among the ``n`` completions of its prompt, from 0.
        text: all text so far. While the request runs, text that may turn into a stop string is held back.
        token_ids: all generated tokens so far, including the token that ended the text.
        finish_reason: ``None`` while the request runs; then ``"stop"`` (end of sequence, stop token or stop string),
            ``"length"`` (``max_tokens`` or the context length), ``"abort"`` or ``"error"``.
        stop_reason: the stop string or stop token id that ended the text, ``None`` for end of sequence; the message if
            ``finish_reason`` is ``"error"``.
        logprobs: one dictionary per token, from token id to :class:`Logprob`; ``None`` unless requested.
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


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times of a request in seconds of ``time.perf_counter``; ``None`` for an event that has not happened yet."""

    arrival_time: float
    first_token_time: float | None
    finish_time: float | None


@dataclass(frozen=True, slots=True)
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
        finish_reason: ``"stop"`` on success, else ``"abort"`` or ``"error"``.
        stop_reason: the message if ``finish_reason`` is ``"error"``.
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
