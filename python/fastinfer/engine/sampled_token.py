"""Drawn tokens and their log-probabilities."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fastinfer import ops


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token with the natural logarithm of its probability, and its rank: 1 for the likeliest."""

    token_id: int
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A drawn token.

    Attributes:
        token_id: the token; -1 if none could be drawn.
        logprobs: the token and the likeliest ones of its position, where the request asks for them.
        error: why no token could be drawn: the logits are not numbers, nothing is allowed, or the grammar failed.
    """

    token_id: int
    logprobs: list[TokenLogprob] | None = None
    error: Exception | None = None


def top_logprobs(logits: Tensor, token_id: int, count: int) -> list[TokenLogprob]:
    """The given token of one row [vocab], then the ``count`` likeliest ones, without the given one twice."""
    logprobs = torch.log_softmax(logits.clone(), dim=-1)  # aligned: a GPU may sum by where a row begins
    values, indices = logprobs.topk(min(count, logits.shape[-1]))
    return _ranked(logits, token_id, logprobs[token_id].item(), indices.tolist(), values.tolist())


def sampled_logprobs(logits: Tensor, sampled: ops.Sampled, row: int, count: int) -> list[TokenLogprob]:
    """:func:`top_logprobs` of one row of a draw, from what the sampling operator has computed already."""
    tokens, values = sampled.top_tokens[row, :count].tolist(), sampled.top_logprobs[row, :count].tolist()
    return _ranked(logits[row], int(sampled.tokens[row]), sampled.logprobs[row].item(), tokens, values)


def _ranked(logits: Tensor, chosen: int, logprob: float, tokens: list[int], values: list[float]) -> list[TokenLogprob]:
    rank = tokens.index(chosen) + 1 if chosen in tokens else int((logits > logits[chosen]).sum()) + 1
    ranked = zip(tokens, values, range(1, len(tokens) + 1), strict=True)
    return [TokenLogprob(chosen, logprob, rank), *(TokenLogprob(*entry) for entry in ranked if entry[0] != chosen)]
