"""How good a student is on unseen text, measured during its training."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import nll_loss

from fastinfer.distill.losses import PART_ROWS
from fastinfer.distill.student import Student
from fastinfer.distill.teacher import Teacher
from fastinfer.evaluation.perplexity import log_probabilities, loss
from fastinfer.llm import kv_cache_dtype_of


@dataclass(frozen=True)
class Judgement:
    """Figures of a student on unseen text.

    Attributes:
        loss: mean negative log-probability of a token, in nats.
        divergence: mean KL(teacher || student), in nats.
        acceptance: mean probability that a token drafted by the student is accepted, the sum of the smaller
            probability of each token.
    """

    loss: float
    divergence: float
    acceptance: float


class Judge:
    """Compares students with the teacher on unseen text.

    Args:
        teacher: the teacher.
        sections: token ids of the texts, of equal length.
        given: number of tokens at the start of each that are not predicted, see
            :attr:`fastinfer.distill.texts.Texts.given`.

    Attributes:
        teacher_loss: the teacher's mean negative log-probability of a token.
    """

    def __init__(self, teacher: Teacher, sections: list[list[int]], given: int) -> None:
        self._sections = sections
        self._first = given - 1  # whose logits predict the first token that is not given
        self._log_probs: list[Tensor] = []  # of the teacher, [tokens - given, vocab] fp16
        losses = []
        for section, found in zip(
            sections, log_probabilities(teacher.model, sections, kv_cache_dtype_of("auto", "auto", "cpu")), strict=True
        ):
            tokens = torch.tensor(section[given:])
            losses.append(loss(found[self._first : -1], tokens) / len(tokens))
            self._log_probs.append(found[self._first : -1].half())
        self.teacher_loss = sum(losses) / len(losses)

    @torch.no_grad()
    def __call__(self, student: Student) -> Judgement:
        """Judge a student."""
        sums = torch.zeros(3, dtype=torch.float64)
        for section, reference in zip(self._sections, self._log_probs, strict=True):
            ids = torch.tensor(section)
            outputs = student.outputs(ids[None, :-1])
            hidden, tokens = outputs.last_hidden_state[0, self._first :], ids[self._first + 1 :]
            for start in range(0, len(hidden), PART_ROWS):
                part = slice(start, start + PART_ROWS)
                p, q = reference[part].float(), student.head(outputs, hidden[part]).float().log_softmax(-1)
                nll = nll_loss(q, tokens[part], reduction="sum")
                sums += torch.stack([nll, (p.exp() * (p - q)).sum(), torch.minimum(p, q).exp().sum()])
        return Judgement(*(sums / sum(map(len, self._log_probs))).tolist())
