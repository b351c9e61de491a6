"""Drawn tokens and their log-probabilities."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fastinfer import ops


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and its probability.

    Attributes:
        token_id: the token.
        logprob: natural logarithm of the token's probability.
        rank: position of the token among all tokens by probability; 1 for the likeliest.
    """

    token_id: int
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A drawn token.

    Attributes:
        token_id: the token; -1 if none could be drawn.
        logprobs: the token, then the likeliest other tokens of its position; ``None`` if they were not requested.
        error: reason why no token could be drawn: the logits hold NaN, no token is allowed, or the grammar failed.
    """

    token_id: int
    logprobs: list[TokenLogprob] | None = None
    error: Exception | None = None


def top_logprobs(logits: Tensor, token_id: int, count: int) -> list[TokenLogprob]:
    """Return the log-probability of a token, then those of the ``count`` likeliest tokens without that token.

    Args:
        logits: [vocab] logits of one position.
        token_id: the token that comes first.
        count: number of likeliest tokens.
    """
    # On a GPU the order of a sum may depend on the row's alignment, which a copy makes always the same.
    logprobs = torch.log_softmax(logits.clone(), dim=-1)
    values, indices = logprobs.topk(min(count, logits.shape[-1]))
    return _ranked(logits, token_id, logprobs[token_id].item(), indices.tolist(), values.tolist())


def sampled_logprobs(logits: Tensor, sampled: ops.Sampled, row: int, count: int) -> list[TokenLogprob]:
    """Return the same as :func:`top_logprobs` for one row of a draw, from the results of the sampling operator."""
    tokens, values = sampled.top_tokens[row, :count].tolist(), sampled.top_logprobs[row, :count].tolist()
    return _ranked(logits[row], int(sampled.tokens[row]), sampled.logprobs[row].item(), tokens, values)


def _ranked(logits: Tensor, chosen: int, logprob: float, tokens: list[int], values: list[float]) -> list[TokenLogprob]:
    """Add ranks to the log-probabilities of the chosen token and the likeliest tokens, which are in order."""
    rank = tokens.index(chosen) + 1 if chosen in tokens else int((logits > logits[chosen]).sum()) + 1
    ranked = zip(tokens, values, range(1, len(tokens) + 1), strict=True)
    return [TokenLogprob(chosen, logprob, rank), *(TokenLogprob(*entry) for entry in ranked if entry[0] != chosen)]
