"""How the tokens of one request are chosen, and when it ends."""

from collections.abc import Sequence
from dataclasses import dataclass

from fastinfer.checks import INT32_MAX, INT64_MAX, check_bool, check_float, check_int, show
from fastinfer.errors import RequestError

MAX_LOGPROBS = 20


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of one request; names and defaults as in vLLM where it has them, ``max_tokens`` apart.

    Attributes:
        temperature: divides the logits, 0..100; 0 takes the likeliest token (greedy).
        top_p: keep the likeliest tokens that together have this probability, in (0, 1].
        top_k: keep the k likeliest tokens; 0 or -1 keeps all.
        min_p: drop tokens less likely than this share of the likeliest one, in [0, 1].
        max_tokens: end after this many generated tokens; ``None`` for as many as the context holds.
        stop: a string or strings that end the text, which is cut before the first of them to be completed.
        stop_token_ids: token ids that end the text and are not part of it.
        ignore_eos: go on after the model's end-of-sequence tokens.
        seed: 0..2**63-1; the same seed, prompt and parameters give the same text, whatever else runs in the batch.
            ``None`` draws one from the operating system.
        logprobs: ``None``, or give for each token its own log-probability and those of the 0..20 likeliest tokens,
            under the model's unmodified distribution.
        skip_special_tokens: leave control tokens such as ``<|im_end|>`` out of the text.

    Raises:
        RequestError: a field is out of its range or of a wrong type.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = 256
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        check_float("temperature", self.temperature, 0.0, 100.0)
        check_float("top_p", self.top_p, 0.0, 1.0, low_open=True)
        check_int("top_k", self.top_k, -1, INT32_MAX)
        check_float("min_p", self.min_p, 0.0, 1.0)
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, 1, INT32_MAX)
        if self.seed is not None:
            check_int("seed", self.seed, 0, INT64_MAX)
        if self.logprobs is not None:
            check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        check_bool("ignore_eos", self.ignore_eos)
        check_bool("skip_special_tokens", self.skip_special_tokens)
        # Tuples, so that equal parameters are equal and hashable however they were given.
        object.__setattr__(self, "stop", self._stop_strings())
        object.__setattr__(self, "stop_token_ids", self._stop_ids())

    def _stop_strings(self) -> tuple[str, ...]:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop or ()
        if not isinstance(stop, list | tuple) or not all(isinstance(s, str) and s for s in stop):
            raise RequestError(f"stop must be a non-empty string or a list of them, got {show(self.stop)}")
        return tuple(stop)

    def _stop_ids(self) -> tuple[int, ...]:
        ids = self.stop_token_ids or ()
        if not isinstance(ids, list | tuple):
            raise RequestError(f"stop_token_ids must be a list of token ids, got {show(ids)}")
        for token_id in ids:
            check_int("stop_token_ids", token_id, 0, INT32_MAX)
        return tuple(ids)


# What is used where nobody names parameters. The class's own default, which is vLLM's, draws from the unmodified
# distribution, and lets a small model ramble.
DEFAULT_PARAMS = SamplingParams(temperature=0.7, top_p=0.95)
