"""From logits to the next token of every sequence."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fastinfer.engine.sequence import Sequence
from fastinfer.ops import sample


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token with the natural logarithm of its probability and its rank, 1 for the likeliest."""

    token_id: int
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A chosen token; ``logprobs`` holds it and the likeliest tokens of its position where the request asked."""

    token_id: int
    logprobs: list[TokenLogprob] | None


class Sampler:
    """Draws each row's token with its sequence's own parameters.

    A draw depends on the request's seed and the token's position alone: neither its neighbours in the batch nor a
    preemption changes it.
    """

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []
        self._parameters: dict[str, Tensor] = {}

    def __call__(self, logits: Tensor, sequences: list[Sequence]) -> list[SampledToken]:
        """Sample from logits [n, vocab] fp32, row i for ``sequences[i]``."""
        if sequences != self._sequences:  # as a rule the same ones decode again
            self._sequences = sequences
            self._parameters = parameters(sequences, logits.device)
        positions = torch.tensor([len(sequence) for sequence in sequences], device=logits.device)
        token_ids = sample(logits, positions=positions, **self._parameters).tokens.tolist()
        logprobs = [sequence.params.logprobs for sequence in sequences]
        return [
            SampledToken(token_id, None if count is None else top_logprobs(logits[row], token_id, count))
            for row, (token_id, count) in enumerate(zip(token_ids, logprobs, strict=True))
        ]


def parameters(sequences: list[Sequence], device: torch.device) -> dict[str, Tensor]:
    """The arguments of :func:`fastinfer.ops.sample` that do not change from one token to the next."""
    params = [sequence.params for sequence in sequences]
    return {
        "temperature": torch.tensor([p.temperature for p in params], dtype=torch.float32, device=device),
        "top_k": torch.tensor([max(p.top_k, 0) for p in params], dtype=torch.int32, device=device),
        "top_p": torch.tensor([p.top_p for p in params], dtype=torch.float32, device=device),
        "min_p": torch.tensor([p.min_p for p in params], dtype=torch.float32, device=device),
        "seeds": torch.tensor([sequence.seed for sequence in sequences], device=device),
    }


def top_logprobs(logits: Tensor, token_id: int, count: int) -> list[TokenLogprob]:
    """The chosen token of one row [vocab], then the ``count`` likeliest ones, without the chosen one twice."""
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = TokenLogprob(token_id, logprobs[token_id].item(), int((logits > logits[token_id]).sum()) + 1)
    values, indices = logprobs.topk(min(count, logits.shape[-1]))
    ranked = zip(indices.tolist(), values.tolist(), range(1, count + 1), strict=False)
    return [chosen, *(TokenLogprob(*entry) for entry in ranked if entry[0] != token_id)]
