"""Objective of the training: a sum of losses against the teacher's records."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import nll_loss

from fastinfer.distill.losses import Targets, WholeTargets, attention_loss, hidden_loss, logit_loss, mean_by_parts
from fastinfer.distill.student import PROJECTIONS, Student
from fastinfer.errors import RequestError

# Records from which the teacher's distributions follow, see fastinfer.distill.recorder.Recorder.take.
DISTRIBUTIONS = ("tokens", "log_probs", "tail", "output")
# Number of layers whose outputs are compared.
HIDDEN_LAYERS = 4


@dataclass(frozen=True)
class Objective:
    """The sum of some losses.

    Attributes:
        losses: some of :data:`fastinfer.distill.settings.LOSSES`.
        divergence: of the logits, one of :data:`fastinfer.distill.settings.DIVERGENCES`.
        temperature: divisor of the logits, of the teacher's records, too.
        hidden_layers: the teacher's layers whose outputs are compared with the student's.
        attention_layer: the teacher's layer whose relations are compared; ``None`` for none.
        relation_heads: number of relation heads.
        given: number of tokens at the start of each text whose predictions do not count, see
            :attr:`fastinfer.distill.texts.Texts.given`.
        teacher_log_probs: function that returns the teacher's log-probabilities of recorded outputs, see
            :meth:`fastinfer.distill.teacher.Teacher.log_probs`.
    """

    losses: Sequence[str]
    divergence: str
    temperature: float
    hidden_layers: Sequence[int]
    attention_layer: int | None
    relation_heads: int
    given: int
    teacher_log_probs: Callable[[Tensor], Tensor]

    def __call__(self, student: Student, shard: dict[str, Tensor]) -> Tensor:
        """Compute the sum for some texts of a shard, see :class:`fastinfer.distill.shards.Shards`."""
        ids = shard["ids"].long()
        layers = {layer: student.layer_of(layer) for layer in self.hidden_layers}
        hidden = {f"hidden.{layer}": own for layer, own in layers.items() if own >= 0}
        attention_layer = None if self.attention_layer is None else student.layer_of(self.attention_layer)
        with student.recording(hidden, attention_layer) as found:
            outputs = student.outputs(ids[:, :-1])
        tokens = ids[:, self.given :].flatten()
        records = {name: shard[name][:, self.given - 1 :].flatten(0, 1) for name in DISTRIBUTIONS if name in shard}

        def token_loss(rows: Tensor, part: slice) -> Tensor:
            logits = student.head(outputs, rows)

            @cache  # losses share them
            def log_probs(temperature: float) -> Tensor:
                return (logits.float() if temperature == 1.0 else logits.float() / temperature).log_softmax(-1)

            losses = []
            if "logit" in self.losses:
                targets = self._targets({name: tensor[part] for name, tensor in records.items()})
                losses.append(logit_loss(log_probs(self.temperature), targets, self.divergence, self.temperature))
            if "ce" in self.losses:
                losses.append(nll_loss(log_probs(1.0), tokens[part]))
            return torch.stack(losses).sum()

        parts = []
        if "logit" in self.losses or "ce" in self.losses:
            parts.append(mean_by_parts(outputs.last_hidden_state[:, self.given - 1 :].flatten(0, 1), token_loss))
        if "hidden" in self.losses:
            parts.append(torch.stack([_hidden(found[name], shard[name]) for name in hidden]).mean())
        if "attention" in self.losses:
            relations = [attention_loss(found[name], shard[name], self.relation_heads) for name in PROJECTIONS]
            parts.append(torch.stack(relations).mean())
        return torch.stack(parts).sum()

    def _targets(self, records: dict[str, Tensor]) -> Targets | WholeTargets:
        if "output" in records:
            return WholeTargets(self.teacher_log_probs(records["output"]))
        return Targets(records["tokens"].long(), records["log_probs"].float(), records["tail"].float())


def _hidden(student: Tensor, teacher: Tensor) -> Tensor:
    if student.shape != teacher.shape:
        raise RequestError(
            f"the hidden loss needs a student as wide as the teacher, {teacher.shape[-1]}, got {student.shape[-1]}; "
            "the attention loss does not"
        )
    return hidden_loss(student.flatten(0, 1), teacher.flatten(0, 1))
