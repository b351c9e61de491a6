"""How the tokens of one request are chosen, and when it ends."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fastinfer.errors import RequestError
from fastinfer.structured_output import StructuredOutputsParams
from fastinfer.utils.checks import INT32_MAX, INT64_MAX, check_bool, check_float, check_int, show

MAX_LOGPROBS = 20
MAX_COMPLETIONS = 128


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of one request; names and defaults as in vLLM where it has them, ``max_tokens`` apart.

    Attributes:
        n: how many completions of the prompt to draw; the prompt is computed once. Completion i has the seed + i.
        temperature: divides the logits, 0..100; 0 takes the likeliest token (greedy).
        top_p: keep the likeliest tokens that together have this probability, in (0, 1].
        top_k: keep the k likeliest tokens; 0 or -1 keeps all.
        min_p: drop tokens less likely than this share of the likeliest one, in [0, 1].
        repetition_penalty: divides positive logits of tokens in prompt or output and multiplies negative ones, in
            (0, 10]; 1 is off.
        presence_penalty: subtracted from the logits of tokens in the output, -2..2.
        frequency_penalty: the same times the token's count in the output, -2..2.
        logit_bias: token id to what is added to its logit, -100..100.
        max_tokens: end after this many generated tokens; ``None`` for as many as the context holds.
        min_tokens: no end of sequence and no stop token before this many generated tokens.
        stop: a string or strings that end the text, which is cut before the first of them to be completed.
        stop_token_ids: token ids that end the text and are not part of it.
        ignore_eos: go on after the model's end-of-sequence tokens.
        seed: 0..2**63-1; the same seed, prompt and parameters give the same text, whatever else runs in the batch.
            ``None`` draws one from the operating system.
        logprobs: ``None``, or give for each token its own log-probability and those of the 0..20 likeliest tokens,
            under the model's unmodified distribution.
        prompt_logprobs: the same for the tokens of the prompt, but its first, which nothing precedes.
        structured_outputs: a grammar that the text obeys, see :class:`fastinfer.StructuredOutputsParams`.
        skip_special_tokens: leave control tokens such as ``<|im_end|>`` out of the text.

    Raises:
        RequestError: a field is out of its range or of a wrong type.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    max_tokens: int | None = 256
    min_tokens: int = 0
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputsParams | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        check_int("n", self.n, 1, MAX_COMPLETIONS)
        check_float("temperature", self.temperature, 0.0, 100.0)
        check_float("top_p", self.top_p, 0.0, 1.0, low_open=True)
        check_int("top_k", self.top_k, -1, INT32_MAX)
        check_float("min_p", self.min_p, 0.0, 1.0)
        check_float("repetition_penalty", self.repetition_penalty, 0.0, 10.0, low_open=True)
        check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, 1, INT32_MAX)
        check_int("min_tokens", self.min_tokens, 0, INT32_MAX if self.max_tokens is None else self.max_tokens)
        if self.seed is not None:
            check_int("seed", self.seed, 0, INT64_MAX)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 0, MAX_LOGPROBS)
        check_bool("ignore_eos", self.ignore_eos)
        check_bool("skip_special_tokens", self.skip_special_tokens)
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            raise RequestError(
                f"structured_outputs must be StructuredOutputsParams, got {show(self.structured_outputs)}"
            )
        # Immutable, so that equal parameters are equal and hashable however they were given.
        object.__setattr__(self, "stop", self._stop_strings())
        object.__setattr__(self, "stop_token_ids", self._stop_ids())
        object.__setattr__(self, "logit_bias", self._bias())

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

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

    def _bias(self) -> "FrozenBias":
        bias = self.logit_bias or {}
        if not isinstance(bias, Mapping):
            raise RequestError(f"logit_bias must map token ids to numbers, got {show(bias)}")
        for token_id, value in bias.items():
            check_int("logit_bias", token_id, 0, INT32_MAX)
            check_float(f"logit_bias[{token_id}]", value, -100.0, 100.0)
        return FrozenBias(sorted(bias.items()))


class FrozenBias(dict[int, float]):
    """A mapping of token ids to biases that can be a part of hashable parameters; nobody changes it."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self.items()))


@dataclass(frozen=True)
class BeamSearchParams:
    """Parameters of a beam search; names as in vLLM.

    Attributes:
        beam_width: texts that are followed at the same time, and texts in the result, 1..10.
        max_tokens: end after this many generated tokens.
        length_penalty: a text's score is the sum of its log-probabilities divided by its length to this power, -10..10;
            0 is the sum itself, larger numbers favour longer texts.
        ignore_eos: go on after the model's end-of-sequence tokens.

    Raises:
        RequestError: a field is out of its range or of a wrong type.
    """

    beam_width: int
    max_tokens: int = 256
    length_penalty: float = 1.0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        check_int("beam_width", self.beam_width, 1, MAX_LOGPROBS // 2)
        check_int("max_tokens", self.max_tokens, 1, INT32_MAX)
        check_float("length_penalty", self.length_penalty, -10.0, 10.0)
        check_bool("ignore_eos", self.ignore_eos)


# What is used where nobody names parameters. The class's own default, which is vLLM's, draws from the unmodified
# distribution, and lets a small model ramble.
DEFAULT_PARAMS = SamplingParams(temperature=0.7, top_p=0.95)
