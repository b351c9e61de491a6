"""What a request gives back."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Logprob:
    """One candidate for one position.

    Attributes:
        logprob: natural logarithm of its probability under the unmodified logits.
        rank: 1 for the likeliest token of the position.
        decoded_token: the token as text.
    """

    logprob: float
    rank: int
    decoded_token: str


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """The generated half of a request, cumulative.

    Attributes:
        index: among the completions of its prompt.
        text: all text so far. While the request runs, what may become a stop string is held back.
        token_ids: all generated tokens so far, the one that ended it included.
        finish_reason: ``None`` while it runs; ``"stop"`` (end of sequence, stop token or stop string), ``"length"``
            (``max_tokens`` or the context), ``"abort"`` or ``"error"``.
        stop_reason: the stop string or stop token id that ended it, ``None`` for end of sequence; for ``"error"`` the
            message.
        logprobs: ``None`` unless asked for; else one dictionary per token, token id to :class:`Logprob`.
        delta: the text that is new since the request's last output.
        cumulative_logprob: of all its tokens; ``None`` unless ``logprobs`` or a beam search was asked for.
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
    """Moments of a request, in seconds of ``time.perf_counter``; ``None`` for what has not happened."""

    arrival_time: float
    first_token_time: float | None
    finish_time: float | None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A request's state after a step.

    Attributes:
        request_id: the engine's name for the request.
        prompt: the prompt as text, ``None`` if it came as token ids.
        prompt_token_ids: the prompt as the model read it.
        outputs: one :class:`CompletionOutput` for each of the ``n`` completions.
        finished: this is the request's last output.
        metrics: when it arrived, started and finished.
        prompt_logprobs: ``None`` unless asked for; else for each token of the prompt, but its first, which has
            ``None``, a dictionary of token id to :class:`Logprob`.
        num_cached_tokens: tokens of the prompt that the prefix cache had.
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
    """The end of a request that generates nothing.

    Attributes:
        request_id: the engine's name for the request.
        prompt_token_ids: the prompt as the model read it.
        finish_reason: ``"stop"`` when all went well, ``"abort"`` or ``"error"``.
        stop_reason: for ``"error"`` the message.
        embedding: [hidden] numbers, where they were asked for and all went well.
    """

    request_id: str
    prompt_token_ids: list[int]
    finish_reason: str
    stop_reason: int | str | None = None
    embedding: list[float] | None = None

    @property
    def finished(self) -> bool:
        """True: there is only one output."""
        return True


@dataclass(frozen=True, slots=True)
class ScoreOutput:
    """How likely a model finds a text.

    Attributes:
        prompt_token_ids: the text as the model read it, a context included.
        logprob: sum of the natural logarithms of the scored tokens' probabilities, each given all tokens before it.
        num_tokens: how many tokens were scored; ``exp(-logprob / num_tokens)`` is their perplexity.
    """

    prompt_token_ids: list[int]
    logprob: float
    num_tokens: int
