"""Chains, which make each draft of a block depend on the one before it."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from fastinfer.weights.weight import Weight

# Logit of a token that is not drafted. Its probability is 0 in fp32 at any temperature, as long as another token may be
# drawn. It is finite, so that the draw does not fail where none may be, as a grammar may want.
MISSING = -1e9


class DraftChain(ABC):
    """Changes the logits of a draft by the token before it."""

    @abstractmethod
    def __call__(self, logits: Tensor, hidden: Tensor, before: Tensor) -> Tensor:
        """Return the logits from which drafts are drawn, [n, vocab] fp32.

        Args:
            logits: [n, vocab], what the head has computed for the whole block at once.
            hidden: [n, hidden], the normalised outputs of its last layer.
            before: [n] int64, the tokens before the drafts.
        """


@dataclass(frozen=True, eq=False)
class CandidateSelector(DraftChain):
    """Adds to the likeliest tokens' logits how well each goes with the token before, and leaves out all others.

    Source: DFlash2, https://github.com/z-lab/dflash.

    Attributes:
        projection: [rank, hidden], of the output at the draft's place.
        predecessors, successors: [vocab, rank], vectors of a token that is the one before, and of one that is drafted.
        top_k: number of tokens among which a draft is drawn.
    """

    projection: Weight
    predecessors: Weight
    successors: Weight
    top_k: int

    def __call__(self, logits: Tensor, hidden: Tensor, before: Tensor) -> Tensor:
        best = logits.float().topk(self.top_k)
        context = self.projection.linear(hidden).float() * self.predecessors.rows(before, torch.float32)
        vectors = self.successors.rows(best.indices.flatten(), torch.float32).unflatten(0, best.indices.shape)
        scores = best.values + (vectors @ context[..., None]).squeeze(-1)
        return logits.new_full(logits.shape, MISSING, dtype=torch.float32).scatter_(1, best.indices, scores)


@dataclass(frozen=True, eq=False)
class MarkovBias(DraftChain):
    """Adds to all logits what the token before says of the next one, as in DSpark.

    Source: https://github.com/deepseek-ai/DeepSpec.

    Attributes:
        embedding: [vocab, rank], vectors of the token before.
        projection: [draft_vocab, rank].
    """

    embedding: Weight
    projection: Weight

    def __call__(self, logits: Tensor, hidden: Tensor, before: Tensor) -> Tensor:
        vectors = self.embedding.rows(before, hidden.dtype)
        return logits.float() + self.projection.linear(vectors).float()
