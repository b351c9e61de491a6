"""Drawn tokens and their log-probabilities."""

from dataclasses import dataclass
from typing import NamedTuple

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


class SampledToken(NamedTuple):  # which is made in half the time of a frozen dataclass
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
    rank = ranks(logits[None], torch.tensor([token_id], device=logits.device))
    return _ranked(token_id, logprobs[token_id].item(), int(rank), indices.tolist(), values.tolist())


def sampled_logprobs(sampled: ops.Sampled, token_ranks: Tensor, row: int, count: int) -> list[TokenLogprob]:
    """Return the same as :func:`top_logprobs` for one row of a draw, from the results of the sampling operator.

    Args:
        sampled: the results, in host memory.
        token_ranks: [rows] int64 ranks of the drawn tokens, see :func:`ranks`.
        row: number of the row.
        count: number of likeliest tokens.
    """
    tokens, values = sampled.top_tokens[row, :count].tolist(), sampled.top_logprobs[row, :count].tolist()
    return _ranked(int(sampled.tokens[row]), sampled.logprobs[row].item(), int(token_ranks[row]), tokens, values)


def ranks(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the rank of one token per row, [rows] int64: 1 more than the number of tokens with a larger logit.

    Args:
        logits: [rows, vocab].
        tokens: [rows] int64; a negative one stands for any token.
    """
    return (logits > logits.gather(1, tokens.clamp(min=0)[:, None])).sum(1) + 1


def _ranked(chosen: int, logprob: float, rank: int, tokens: list[int], values: list[float]) -> list[TokenLogprob]:
    """Add ranks to the log-probabilities of the chosen token and the likeliest tokens, which are in order."""
    if chosen in tokens:  # of tokens with equal logits, the first ones come first
        rank = tokens.index(chosen) + 1
    ranked = zip(tokens, values, range(1, len(tokens) + 1), strict=True)
    return [TokenLogprob(chosen, logprob, rank), *(TokenLogprob(*entry) for entry in ranked if entry[0] != chosen)]
