"""From logits to the next token of every sequence."""

from dataclasses import dataclass

import numpy as np
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
    preemption changes it. The parameters always lie in the same memory, where a recorded :meth:`draw` finds them.

    Args:
        max_num_seqs: rows at most.
    """

    def __init__(self, max_num_seqs: int) -> None:
        floats, integers = np.zeros((3, max_num_seqs), np.float32), np.zeros((2, max_num_seqs), np.int64)
        self._temperature, self._top_p, self._min_p = floats
        self._seeds, self._positions = integers
        self._top_k = np.zeros(max_num_seqs, np.int32)
        self._sequences: list[Sequence] = []

    def prepare(self, sequences: list[Sequence]) -> None:
        """Write down whose tokens are drawn next."""
        rows = slice(len(sequences))
        if sequences != self._sequences:  # as a rule the same ones decode again
            self._sequences = sequences
            params = [sequence.params for sequence in sequences]
            self._temperature[rows] = [p.temperature for p in params]
            self._top_k[rows] = [max(p.top_k, 0) for p in params]
            self._top_p[rows] = [p.top_p for p in params]
            self._min_p[rows] = [p.min_p for p in params]
            self._seeds[rows] = [sequence.seed for sequence in sequences]
        self._positions[rows] = [len(sequence) for sequence in sequences]

    def draw(self, logits: Tensor) -> Tensor:
        """One token [n] int64 for each row of logits [n, vocab] fp32, in the order of the prepared sequences."""

        def rows(values: np.ndarray) -> Tensor:
            return torch.from_numpy(values)[: len(logits)].to(logits.device)

        return sample(
            logits,
            temperature=rows(self._temperature),
            top_k=rows(self._top_k),
            top_p=rows(self._top_p),
            min_p=rows(self._min_p),
            seeds=rows(self._seeds),
            positions=rows(self._positions),
        ).tokens

    def sampled(self, logits: Tensor, drawn: Tensor) -> list[SampledToken]:
        """What was drawn, with log-probabilities for the sequences that want them."""
        counts = [sequence.params.logprobs for sequence in self._sequences]
        return [
            SampledToken(token_id, None if count is None else top_logprobs(logits[row], token_id, count))
            for row, (token_id, count) in enumerate(zip(drawn.tolist(), counts, strict=True))
        ]


def top_logprobs(logits: Tensor, token_id: int, count: int) -> list[TokenLogprob]:
    """The chosen token of one row [vocab], then the ``count`` likeliest ones, without the chosen one twice."""
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = TokenLogprob(token_id, logprobs[token_id].item(), int((logits > logits[token_id]).sum()) + 1)
    values, indices = logprobs.topk(min(count, logits.shape[-1]))
    ranked = zip(indices.tolist(), values.tolist(), range(1, count + 1), strict=False)
    return [chosen, *(TokenLogprob(*entry) for entry in ranked if entry[0] != token_id)]
