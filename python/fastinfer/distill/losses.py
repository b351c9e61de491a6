"""Losses of distillation: pure functions of torch tensors, differentiable in the student's.

Each is a mean over the tokens, in nats or without a unit.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Logit of a token that is not seen: finite, because gradients of infinities are not numbers.
UNSEEN = -1e9
# Rows whose logits exist at a time.
PART_ROWS = 128


@dataclass(frozen=True)
class Targets:
    """The teacher's distributions, as its likeliest tokens and one outcome that stands for all others.

    The divergence of these is a lower bound on that of the whole distributions, and equal to it where the student's
    other probabilities are proportional to the teacher's.

    Attributes:
        tokens: [n, k] int64, the likeliest tokens of each position.
        log_probs: [n, k], their log-probabilities.
        tail: [n], logarithm of the probability of all other tokens together.
    """

    tokens: Tensor
    log_probs: Tensor
    tail: Tensor

    def compare(self, log_probs: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probabilities [n, k + 1] of the teacher and of a student with [n, vocab]."""
        p = torch.cat([self.log_probs, self.tail[:, None]], -1).float().log_softmax(-1)
        chosen = log_probs.gather(-1, self.tokens)
        others = torch.log1p(-chosen.exp().sum(-1, keepdim=True).clamp(max=1 - 1e-6))
        return p, torch.cat([chosen, others], -1)


@dataclass(frozen=True)
class WholeTargets:
    """The teacher's distributions over all tokens.

    Attributes:
        log_probs: [n, vocab].
    """

    log_probs: Tensor

    def compare(self, log_probs: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probabilities [n, vocab] of the teacher and of a student with [n, vocab]."""
        return self.log_probs, log_probs


def logit_loss(log_probs: Tensor, targets: Targets | WholeTargets, divergence: str, temperature: float = 1.0) -> Tensor:
    """Compute the divergence of the student's distributions from the teacher's.

    Args:
        log_probs: [n, vocab] fp32, the student's, of logits that are divided by the temperature.
        targets: the teacher's distributions, with logits divided by the same temperature.
        divergence: ``"fkl"``, Kullback-Leibler divergence KL(teacher || student); ``"rkl"``, KL(student || teacher);
            ``"jsd"``, Jensen-Shannon divergence; ``"lk"``, ``-log`` of the probability that a draft is accepted,
            the sum of ``min(teacher, student)`` (arXiv 2602.23881).
        temperature: that divisor; the result is multiplied by its square, so that gradients keep their size.
    """
    p, q = targets.compare(log_probs)
    if divergence == "fkl":
        loss = _kl(p, q)
    elif divergence == "rkl":
        loss = _kl(q, p)
    elif divergence == "jsd":
        mixture = torch.logaddexp(p, q) - math.log(2)
        loss = (_kl(p, mixture) + _kl(q, mixture)) / 2
    else:
        assert divergence == "lk"
        loss = -torch.minimum(p, q).exp().sum(-1).log()
    return loss.mean() * temperature**2


def mean_by_parts(hidden: Tensor, loss: Callable[[Tensor, slice], Tensor]) -> Tensor:
    """Compute the mean of a loss over rows of hidden states, a part of the rows at a time.

    Each part's gradient is computed at once, so that the logits of one part exist, not those of all rows: 1,020 rows of
    49,152 take 200 MB in fp32, and a loss has several tensors of this size.

    Args:
        hidden: [n, hidden].
        loss: function of some of the rows and their place among all, which returns their mean loss. Of what it uses,
            only the rows get gradients.
    """
    mean: Tensor = _MeanByParts.apply(hidden, loss)  # type: ignore[no-untyped-call]
    return mean


class _MeanByParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, loss: Callable[[Tensor, slice], Tensor]) -> Tensor:
        gradient = torch.empty_like(hidden)
        total = torch.zeros(())
        for start in range(0, len(hidden), PART_ROWS):
            part = slice(start, start + PART_ROWS)
            rows = hidden[part].detach().requires_grad_()
            with torch.enable_grad():
                value = loss(rows, part) * (len(rows) / len(hidden))
            gradient[part] = torch.autograd.grad(value, rows)[0]
            total += value.detach()
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * scale, None


def hidden_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """Compute the squared distance of hidden states [n, hidden], relative to the teacher's squared length."""
    teacher = teacher.float()
    return ((student.float() - teacher).square().sum(-1) / teacher.square().sum(-1)).mean()


def attention_loss(student: Tensor, teacher: Tensor, num_heads: int) -> Tensor:
    """Compute the divergence of relations among the tokens of a text, as in MiniLMv2 (arXiv 2012.15828).

    A relation of a token is the softmax of the scaled products of its vector with those up to it. So the vectors, which
    are queries, keys or values, may have another width than the teacher's.

    Args:
        student: [texts, tokens, width] vectors of all heads.
        teacher: the same of the teacher, in any width.
        num_heads: number of relation heads, which divides both widths.
    """
    return _kl(_relations(teacher, num_heads), _relations(student, num_heads)).mean()


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """Return KL(p || q) over the last axis, of finite log-probabilities."""
    return (p.exp() * (p - q)).sum(-1)


def _relations(vectors: Tensor, num_heads: int) -> Tensor:
    """Return [texts, heads, tokens, tokens] log-probabilities, about ``UNSEEN`` for later tokens."""
    heads = vectors.float().unflatten(-1, (num_heads, -1)).transpose(1, 2)
    scores = heads @ heads.transpose(-1, -2) / math.sqrt(heads.shape[-1])
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    relations: Tensor = scores.masked_fill(later, UNSEEN).log_softmax(-1)
    return relations
