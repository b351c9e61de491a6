"""Rules of the cache: the requests that it may answer, and the answers that it may store."""

from collections.abc import Iterable
from dataclasses import dataclass

from fastinfer.sampling_params import SamplingParams

# An answer that ended in another way ("abort", "error") is not what the model would say.
COMPLETE = frozenset({"stop", "length"})
# Directives that ask for a new answer; browsers send the second one when a page is reloaded.
NO_CACHE = frozenset({"no-cache", "max-age=0"})


@dataclass(frozen=True)
class CacheUse:
    """Permissions of one request in the cache.

    Attributes:
        read: it may be answered from the cache.
        write: its answer may be stored.
    """

    read: bool
    write: bool


def cache_use(params: SamplingParams, cache_control: str, cache_sampled: bool = False) -> CacheUse:
    """Return what a request may do with the cache.

    Args:
        params: sampling parameters of the request.
        cache_control: value of the request's ``Cache-Control`` header, "" for none. ``no-cache`` and ``max-age=0`` ask
            for a new answer, which replaces the stored one; ``no-store`` keeps the answer out of the cache.
        cache_sampled: the client has asked to cache this request although a repetition would give another answer.
    """
    directives = {directive.strip().lower() for directive in cache_control.split(",")}
    # What logits processors do is not known; the limit on a reasoning's tokens is one.
    if not (is_deterministic(params) or cache_sampled) or has_logprobs(params) or params.logits_processors:
        return CacheUse(read=False, write=False)
    return CacheUse(read=not directives & NO_CACHE, write="no-store" not in directives)


def is_deterministic(params: SamplingParams) -> bool:
    """Say whether a repetition of the request gives the same answer: it is greedy or has a seed."""
    return params.temperature == 0 or params.seed is not None


def has_logprobs(params: SamplingParams) -> bool:
    """Say whether the answer has log-probabilities, which are not stored: they are many times larger than the text."""
    return params.logprobs is not None or params.prompt_logprobs is not None


def is_complete(finish_reasons: Iterable[str | None]) -> bool:
    """Say whether all completions of an answer have ended by themselves, so that it may be stored."""
    reasons = set(finish_reasons)
    return bool(reasons) and reasons <= COMPLETE
