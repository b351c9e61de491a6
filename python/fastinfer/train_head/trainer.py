"""The training of a head on recorded answers, and its acceptance on others."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import log_softmax
from torch.nn.utils.rnn import pad_sequence

from fastinfer.train_head.head import TrainableHead
from fastinfer.train_head.recorder import Answer
from fastinfer.utils.learning_rate import learning_rate
from fastinfer.utils.machine import has_bf16

# Drafts in a row that the head learns. Later ones are rare, and each costs as much as the first.
NUM_STEPS = 2
# In the few minutes of a run the number of updates counts more than their precision.
BATCH_TEXTS = 2
LEARNING_RATE = 1e-3
MAX_NORM = 1.0
NO_TOKEN = -1


@dataclass(frozen=True, eq=False)
class Examples:
    """A batch of answers, padded to the longest.

    Attributes:
        tokens: [texts, length] int64.
        aux: [texts, length, num_aux * hidden].
        columns: [texts, length, k] int64, the likeliest next tokens as columns of the head's logits, ``NO_TOKEN`` for
            those that it does not have; of tokens of prompts all are.
        probs: [texts, length, k], their probabilities.
    """

    tokens: Tensor
    aux: Tensor
    columns: Tensor
    probs: Tensor

    @classmethod
    def of(cls, answers: Sequence[Answer], column_of: Tensor) -> "Examples":
        """Make a batch.

        Args:
            answers: the answers.
            column_of: [vocab] int64, the column of each token.
        """

        def padded(values: list[Tensor], padding: float) -> Tensor:
            return pad_sequence(values, batch_first=True, padding_value=padding)

        columns = [column_of[answer.top_tokens.long()] for answer in answers]
        skipped = [
            (torch.zeros(a.first, c.shape[1], dtype=c.dtype) + NO_TOKEN, a)
            for a, c in zip(answers, columns, strict=True)
        ]
        return cls(
            padded([answer.tokens for answer in answers], 0),
            padded([answer.aux for answer in answers], 0).float(),
            padded([torch.cat([before, c]) for (before, _), c in zip(skipped, columns, strict=True)], NO_TOKEN),
            padded([torch.cat([before * 0.0, a.top_probs.float()]) for before, a in skipped], 0),
        )


def draft_loss(logits: list[Tensor], examples: Examples) -> Tensor:
    """Compute the cross-entropy of the model's distributions and the head's, mean over tokens and steps.

    Of the model's distributions those tokens count that the head has, and sum to 1.
    """
    known = examples.columns != NO_TOKEN
    weights = examples.probs * known
    total = weights.sum(-1)
    weights = weights / total.clamp(min=1e-6)[..., None]
    is_answer = total > 0
    losses = []
    for step in logits:
        logprobs = log_softmax(step[is_answer].float(), -1).gather(-1, examples.columns[is_answer].clamp(min=0))
        losses.append(-(weights[is_answer] * logprobs).sum(-1).mean())
    return torch.stack(losses).mean()


def num_right(logits: list[Tensor], examples: Examples) -> Tensor:
    """Count greedy drafts.

    Returns:
        [steps + 1] int64: the number of tokens, and of those whose first drafts, up to each step, are all right. The
        draft of step s at a token follows right drafts at the s tokens before.
    """
    right = [(step.argmax(-1) == examples.columns[..., 0]) for step in logits]
    is_answer = (examples.probs > 0).any(-1)
    # A row of drafts begins where all its tokens are a part of the answer.
    starts = is_answer.clone()
    for step in range(1, len(logits)):
        starts[:, :-step] &= is_answer[:, step:]
        starts[:, -step:] = False
    counts, accepted = [starts.sum()], starts
    for step, hits in enumerate(right):
        accepted = accepted & torch.nn.functional.pad(hits[:, step:], (0, step))
        counts.append(accepted.sum())
    return torch.stack(counts)


class Trainer:
    """Trains a head.

    Args:
        head: the head.
        embed: function that returns the rows of the model's embedding for tokens [n], [n, hidden] fp32.
        column_of: [vocab] int64, the head's column of each token, ``NO_TOKEN`` for none.
    """

    def __init__(self, head: TrainableHead, embed: Callable[[Tensor], Tensor], column_of: Tensor) -> None:
        self._head = head
        self._embed = embed
        self._column_of = column_of
        self._optimizer = torch.optim.AdamW(head.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
        self._autocasts = has_bf16()

    def train(self, answers: list[Answer], seconds: float, progress: Callable[[float, float], None]) -> float:
        """Train for some time.

        Args:
            answers: the answers to learn from.
            seconds: the time.
            progress: function that is called with the share of the time that has passed and the loss.

        Returns:
            The number of times that each answer was seen.
        """
        start, share, num_seen = time.monotonic(), 0.0, 0
        generator = random.Random(0)
        while share < 1.0:
            order = generator.sample(answers, len(answers))
            for begin in range(0, len(order), BATCH_TEXTS):
                share = (time.monotonic() - start) / seconds
                if share >= 1.0:
                    break
                batch = order[begin : begin + BATCH_TEXTS]
                rate = learning_rate(LEARNING_RATE, share)
                progress(share, self._step(Examples.of(batch, self._column_of), rate))
                num_seen += len(batch)
        return num_seen / len(answers)

    @torch.no_grad()
    def acceptance(self, answers: list[Answer]) -> list[float]:
        """Return the share of greedy drafts that the model accepts, of those whose predecessors it accepts."""
        counts = torch.zeros(NUM_STEPS + 1, dtype=torch.int64)
        for begin in range(0, len(answers), BATCH_TEXTS):
            examples = Examples.of(answers[begin : begin + BATCH_TEXTS], self._column_of)
            counts += num_right(self._logits(examples), examples)
        return [float(right / max(int(all_), 1)) for all_, right in pairwise(counts)]

    def _step(self, examples: Examples, rate: float) -> float:
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        loss = draft_loss(self._logits(examples), examples)
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._head.parameters(), MAX_NORM)
        self._optimizer.step()
        return loss.item()

    def _logits(self, examples: Examples) -> list[Tensor]:
        embeddings = self._embed(examples.tokens.flatten()).view(*examples.tokens.shape, -1)
        with torch.autocast("cpu", torch.bfloat16, enabled=self._autocasts):
            logits: list[Tensor] = self._head(embeddings, examples.aux, NUM_STEPS)
        return logits
