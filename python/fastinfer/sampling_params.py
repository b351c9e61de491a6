"""Parameters of a request: how its tokens are chosen and when it ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, TypeAlias

from fastinfer.errors import RequestError
from fastinfer.structured_output import StructuredOutputsParams
from fastinfer.utils.checks import INT32_MAX, INT64_MAX, check_bool, check_float, check_int, show

if TYPE_CHECKING:
    from torch import Tensor

# From the generated tokens so far and the logits of the next one, [vocab] fp32, to the new logits, or None if it has
# changed them in place.
LogitsProcessor: TypeAlias = "Callable[[Sequence[int], Tensor], Tensor | None]"

MAX_LOGPROBS = 20
MAX_COMPLETIONS = 128
# Enough for most of a large vocabulary. Each id is checked, perhaps in a server's event loop.
MAX_ALLOWED_TOKEN_IDS = 2**17


class RequestOutputKind(Enum):
    """Content of the outputs of a running request, named as in vLLM.

    Attributes:
        CUMULATIVE: everything that was generated so far.
        DELTA: what is new since the request's previous output.
        FINAL_ONLY: everything, in one output at the end.
    """

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request. Names and defaults follow vLLM, except the default of ``max_tokens``.

    Attributes:
        n: number of completions to draw; the prompt is computed once. Completion i uses ``seed + i``.
        temperature: divisor of the logits, 0..100; 0 always takes the most likely token (greedy).
        top_p: keep the smallest set of most likely tokens whose probabilities add up to this, in (0, 1].
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        min_p: drop tokens less likely than this fraction of the most likely token's probability, in [0, 1].
        repetition_penalty: divisor of positive logits and factor of negative logits of tokens that occur in the prompt
            or the output, 0.01..10; 1 is off.
        presence_penalty: subtracted from the logits of tokens that occur in the output, -2..2.
        frequency_penalty: subtracted from a token's logit once for every occurrence in the output, -2..2.
        logit_bias: token id to a number that is added to its logit, -100..100. The engine limits their number, and that
            of ``stop``, ``stop_token_ids`` and ``bad_words``, see :class:`fastinfer.engine.config.EngineConfig`.
        allowed_token_ids: the only tokens that may be drawn, at most 131,072; ``None`` for all. Without the end of
            sequence among them the text goes on until ``max_tokens``.
        bad_words: words that the text must not contain, neither at its beginning nor after a space. Each is forbidden
            as the tokens that the tokenizer splits it into; the model may spell it in another way.
        logits_processors: functions that change the logits of the next token, called one after another with the tokens
            generated so far (a read-only sequence) and the logits [vocab] in fp32, on the model's device. Each changes
            the logits in place or returns new ones. They come before everything else that changes the distribution:
            penalties, ``logit_bias``, the masks of forbidden tokens, temperature, ``min_p``, ``top_k`` and ``top_p``.
            They must depend on their arguments alone, because a token may be drawn for a draft that is rejected later.
            Every step waits for them, and an error in one ends the request with the finish reason ``"error"``.
        max_tokens: largest number of generated tokens; ``None`` for as many as the context holds.
        min_tokens: number of generated tokens before which no end of sequence and no stop token is drawn, and in whose
            text no string of ``stop`` ends.
        stop: a string or strings that end the text. The text is cut before the first stop string that is completed.
        stop_token_ids: token ids that end the text and are not part of it.
        include_stop_str_in_output: let the text end with the stop string, or with the text of the stop token.
        ignore_eos: continue after the model's end-of-sequence tokens.
        seed: 0..2**63-1. The same seed, prompt and parameters give the same text, whatever else is in the batch.
            ``None`` draws a seed from the operating system.
        logprobs: return the log-probability of each generated token and of the 0..20 most likely tokens at its
            position, under the model's unmodified distribution; ``None`` returns none.
        prompt_logprobs: the same for every token of the prompt except the first, which nothing precedes.
        truncate_prompt_tokens: keep only this many tokens at the end of the prompt; -1 for as many as fit into the
            context beside one generated token, ``None`` for all.
        structured_outputs: grammar that the text obeys, see :class:`fastinfer.StructuredOutputsParams`.
        skip_special_tokens: leave control tokens such as ``<|im_end|>`` out of the text.
        kept_special_tokens: ids of control tokens that stay in the text nevertheless, such as the marks of tool calls.
        output_kind: what each output contains, see :class:`RequestOutputKind`. Methods that return only finished
            outputs always return everything.

    Raises:
        RequestError: a field is out of range or has a wrong type.
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
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = ()
    logits_processors: Sequence[LogitsProcessor] | None = ()
    max_tokens: int | None = 256
    min_tokens: int = 0
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    structured_outputs: StructuredOutputsParams | None = None
    skip_special_tokens: bool = True
    kept_special_tokens: Sequence[int] | None = ()
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        check_int("n", self.n, 1, MAX_COMPLETIONS)
        check_float("temperature", self.temperature, 0.0, 100.0)
        check_float("top_p", self.top_p, 0.0, 1.0, low_open=True)
        check_int("top_k", self.top_k, -1, INT32_MAX)
        check_float("min_p", self.min_p, 0.0, 1.0)
        check_float("repetition_penalty", self.repetition_penalty, 0.01, 10.0)
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
        if self.truncate_prompt_tokens not in (None, -1):
            check_int("truncate_prompt_tokens", self.truncate_prompt_tokens, 1, INT32_MAX)
        check_bool("include_stop_str_in_output", self.include_stop_str_in_output)
        check_bool("ignore_eos", self.ignore_eos)
        check_bool("skip_special_tokens", self.skip_special_tokens)
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            raise RequestError(
                f"structured_outputs must be StructuredOutputsParams, got {show(self.structured_outputs)}"
            )
        if not isinstance(self.output_kind, RequestOutputKind):
            raise RequestError(f"output_kind must be a RequestOutputKind, got {show(self.output_kind)}")
        # Convert to immutable types, so that equal parameters compare equal and are hashable however they were given.
        object.__setattr__(self, "stop", self._strings("stop"))
        object.__setattr__(self, "bad_words", self._strings("bad_words"))
        object.__setattr__(self, "stop_token_ids", self._token_ids("stop_token_ids"))
        object.__setattr__(self, "kept_special_tokens", self._token_ids("kept_special_tokens"))
        if self.allowed_token_ids is not None:
            if isinstance(self.allowed_token_ids, Sized) and len(self.allowed_token_ids) == 0:
                raise RequestError(f"allowed_token_ids must be at least one, got {show(self.allowed_token_ids)}")
            if isinstance(self.allowed_token_ids, Sized) and len(self.allowed_token_ids) > MAX_ALLOWED_TOKEN_IDS:
                raise RequestError(
                    f"allowed_token_ids must be at most {MAX_ALLOWED_TOKEN_IDS}, got {len(self.allowed_token_ids)}"
                )
            object.__setattr__(self, "allowed_token_ids", self._token_ids("allowed_token_ids"))
        object.__setattr__(self, "logit_bias", self._bias())
        object.__setattr__(self, "logits_processors", self._processors())

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    def _strings(self, name: str) -> tuple[str, ...]:
        """Return a field of one or several strings as a tuple."""
        value = getattr(self, name)
        strings = (value,) if isinstance(value, str) else value or ()
        if not isinstance(strings, list | tuple) or not all(isinstance(s, str) and s for s in strings):
            raise RequestError(f"{name} must be a non-empty string or a list of them, got {show(value)}")
        return tuple(strings)

    def _token_ids(self, name: str) -> tuple[int, ...]:
        """Return a field of token ids as a tuple."""
        ids = getattr(self, name)
        if ids is None:
            return ()
        if isinstance(ids, str | bytes) or not isinstance(ids, Sequence):
            raise RequestError(f"{name} must be a list of token ids, got {show(ids)}")
        for token_id in ids:
            check_int(name, token_id, 0, INT32_MAX)
        return tuple(ids)

    def _processors(self) -> tuple[LogitsProcessor, ...]:
        processors = self.logits_processors or ()
        if not isinstance(processors, list | tuple) or not all(map(callable, processors)):
            raise RequestError(f"logits_processors must be a list of functions, got {show(processors)}")
        return tuple(processors)

    def _bias(self) -> FrozenBias:
        bias = self.logit_bias or {}
        if not isinstance(bias, Mapping):
            raise RequestError(f"logit_bias must map token ids to numbers, got {show(bias)}")
        for token_id, value in bias.items():
            check_int("logit_bias", token_id, 0, INT32_MAX)
            check_float(f"logit_bias[{token_id}]", value, -100.0, 100.0)
        return FrozenBias(sorted(bias.items()))


class FrozenBias(dict[int, float]):
    """Hashable dictionary from token ids to biases. It must not be changed."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self.items()))


@dataclass(frozen=True)
class BeamSearchParams:
    """Parameters of a beam search, named as in vLLM.

    Attributes:
        beam_width: number of beams, and of texts in the result, 1..10. There are fewer texts only if the search is cut
            short before it has found that many, or if no more are possible.
        max_tokens: largest number of generated tokens.
        length_penalty: exponent of the length by which the sum of a text's log-probabilities is divided to give its
            score, -10..10; 0 scores by the sum itself, larger numbers favour longer texts.
        ignore_eos: continue after the model's end-of-sequence tokens.

    Raises:
        RequestError: a field is out of range or has a wrong type.
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


# Used where the caller gives no parameters. SamplingParams() itself, like vLLM's, draws from the unmodified
# distribution, with which a small model rambles.
DEFAULT_PARAMS = SamplingParams(temperature=0.7, top_p=0.95)
