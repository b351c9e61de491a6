"""What the engine needs to know of a request, whatever it asks for."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from fastinfer.engine.sampled_token import SampledToken
from fastinfer.engine.scheduler import Scheduler
from fastinfer.engine.sequence import Sequence
from fastinfer.models import Model
from fastinfer.outputs import PrefillOutput, RequestOutput

Output = RequestOutput | PrefillOutput


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """What a step brought to one sequence.

    Attributes:
        sequence: whose.
        start: position of the first token that was computed.
        step_hidden: [tokens, hidden] of the whole step, before the last norm; valid until the next one.
        rows: its own of them.
        tokens: drawn, to be appended; empty while its prompt is not computed to the end.
        is_last: whether all its tokens are computed now.
    """

    model: Model
    sequence: Sequence
    start: int
    step_hidden: Tensor
    rows: slice
    tokens: list[SampledToken]
    is_last: bool

    @property
    def hidden(self) -> Tensor:
        """[n, hidden]; few requests ask, and slicing a tensor takes 35 us after a step, when nothing is cached."""
        return self.step_hidden[self.rows]

    def logits(self, begin: int, end: int) -> Tensor:
        """[end - begin, vocab] fp32: after tokens ``start + begin`` to ``start + end - 1``."""
        return self.model.logits(self.hidden, torch.arange(begin, end, device=self.hidden.device)).float()

    def normalized(self) -> Tensor:
        """``hidden`` after the last norm."""
        return self.model.normalize(self.hidden)


class Request(ABC):
    """One call of the user, and the sequences that are computed for it.

    Attributes:
        request_id: the engine's name for it.
        sequences: whose tokens it takes.
    """

    request_id: str
    sequences: list[Sequence]

    @property
    @abstractmethod
    def unfinished(self) -> list[Sequence]:
        """Those of its sequences that go on; none when the request has ended."""

    @abstractmethod
    def update(self, step: SequenceStep) -> None:
        """Take in what a step brought to one of its sequences."""

    def end_step(self, scheduler: Scheduler) -> None:  # noqa: B027  (most requests' sequences are independent)
        """All its sequences have taken what the step brought."""

    @abstractmethod
    def finish(self, reason: str, stop_reason: int | str | None = None) -> None:
        """End what has not ended by itself; the second time does nothing."""

    @abstractmethod
    def output(self) -> Output | None:
        """The state for the user, or ``None`` if there is nothing to be told yet."""
