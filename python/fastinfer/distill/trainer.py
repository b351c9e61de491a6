"""Training of a student within a time limit, in one stage or in several with fewer and fewer layers."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import torch
from torch import Tensor

from fastinfer.distill.judge import Judge, Judgement
from fastinfer.distill.layers import drop_layers
from fastinfer.distill.objective import Objective
from fastinfer.distill.shards import Shards
from fastinfer.distill.student import Student
from fastinfer.errors import RequestError
from fastinfer.utils.learning_rate import learning_rate

BATCH_SECTIONS = 4
PROBE_SECTIONS = 2  # to measure the layers with
JUDGEMENTS = 5  # in each stage
CLIPPED_NORM = 1.0


@dataclass(frozen=True)
class Point:
    """State of a run.

    Attributes:
        seconds: time since its start.
        num_layers: number of layers of the student.
        num_tokens: number of tokens that it has been trained on.
        judgement: the student on unseen text.
    """

    seconds: float
    num_layers: int
    num_tokens: int
    judgement: Judgement


@dataclass(eq=False)
class Trainer:
    """Trains a student.

    Attributes:
        student, objective, shards, judge: what is trained, for what, with what, and how it is judged.
        learning_rate: the largest learning rate of AdamW.
        clock: function that returns the time in seconds.
        start: when the run began, by that clock.
        limit: seconds after which it ends.
        on_progress: function that is called with the seconds since the start and what was done last.
        points: the state at the start of each stage, while it lasts and at its end.
    """

    student: Student
    objective: Objective
    shards: Shards
    judge: Judge
    learning_rate: float
    clock: Callable[[], float]
    start: float
    limit: float
    on_progress: Callable[[float, str], None] = lambda seconds, text: None
    points: list[Point] = field(default_factory=list)
    num_tokens: int = 0

    def train(self, stages: Sequence[int]) -> None:
        """Train in stages, each of which has an equal share of the time that is left when it begins.

        Args:
            stages: number of layers in each; layers are dropped at its start.

        Raises:
            RequestError: the whole time is over before the first step of a stage, or the training diverges.
        """
        shard = self.shards[0]
        batches = self._batches(shard)
        probe = shard["ids"][:PROBE_SECTIONS].long()
        for index, num_layers in enumerate(stages):
            drop_layers(self.student, num_layers, probe, self.objective.given, partial(self._check_time, num_layers))
            num_tokens = self.num_tokens
            self._judge()
            begin = self._seconds()
            self._train_stage(batches, begin, begin + (self.limit - begin) / (len(stages) - index))
            if self.num_tokens == num_tokens:
                raise self._no_time(num_layers)

    def _check_time(self, num_layers: int) -> None:
        seconds = self._seconds()
        if seconds >= self.limit:
            raise self._no_time(num_layers)
        self.on_progress(seconds, f"choosing {num_layers} layers")

    def _no_time(self, num_layers: int) -> RequestError:
        return RequestError(
            f"minutes: expected more time for the stage of {num_layers} layers, got {self.limit / 60:.3g}: "
            f"none was left {self._seconds() / 60:.1f} minutes after the start"
        )

    def _train_stage(self, batches: Iterator[dict[str, Tensor]], begin: float, end: float) -> None:
        parameters = [parameter for parameter in self.student.model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
        num_judged = 0
        self.student.model.train()
        while (share := (self._seconds() - begin) / max(end - begin, 1e-9)) < 1:
            if share >= (num_judged + 1) / JUDGEMENTS:
                num_judged += 1
                self._judge()
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(self.learning_rate, share)
            batch = next(batches)
            loss = self.objective(self.student, batch)
            loss.backward()
            self._check_finite(float(torch.nn.utils.clip_grad_norm_(parameters, CLIPPED_NORM)))
            optimizer.step()
            optimizer.zero_grad()
            self.num_tokens += batch["ids"].numel()
            self.on_progress(self._seconds(), f"loss {float(loss.detach()):.3f}")
        self._judge()

    def _check_finite(self, value: float) -> None:
        if not math.isfinite(value):
            raise RequestError(
                f"learning_rate, temperature: expected ones with which the training converges, got "
                f"{self.learning_rate:g} and {self.objective.temperature:g}: after {self.num_tokens} tokens losses or "
                "gradients are not finite"
            )

    def _batches(self, shard: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """Yield the batches of a first shard, then those of the next ones."""
        generator = torch.Generator().manual_seed(0)
        for index in count(1):
            for rows in torch.randperm(len(shard["ids"]), generator=generator).split(BATCH_SECTIONS):
                yield {name: tensor[rows] for name, tensor in shard.items()}
            shard = self.shards[index]

    def _judge(self) -> None:
        self.student.model.eval()
        judgement = self.judge(self.student)
        self.student.model.train()
        self._check_finite(judgement.loss)
        seconds = self._seconds()
        self.points.append(Point(seconds, len(self.student.layers), self.num_tokens, judgement))
        self.on_progress(seconds, f"loss on unseen text {judgement.loss:.3f}")

    def _seconds(self) -> float:
        return self.clock() - self.start
