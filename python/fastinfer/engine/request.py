"""The interface between the engine and every kind of request."""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from fastinfer.engine.sampled_token import SampledToken
from fastinfer.engine.scheduler import Scheduler
from fastinfer.engine.sequence import Sequence
from fastinfer.models import Model
from fastinfer.outputs import PrefillOutput, RequestOutput

Output = RequestOutput | PrefillOutput


class SequenceStep(NamedTuple):
    """The result of one step for one sequence.

    Attributes:
        model: the model that ran the step.
        sequence: the sequence that was computed.
        start: position of the first token that was computed.
        step_hidden: [tokens, hidden] hidden states of the whole step, before the last norm; valid until the next step.
        rows: this sequence's rows of ``step_hidden``.
        tokens: drawn tokens to append; empty until the prompt is fully computed.
        is_last: whether all tokens that the sequence had are computed now.
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
        """Hidden states of this sequence, [n, hidden], before the last norm.

        They are sliced on demand: few requests need them, and slicing a tensor right after a step, when the CPU's
        caches are cold, takes 35 us.
        """
        return self.step_hidden[self.rows]

    def logits(self, begin: int, end: int) -> Tensor:
        """Compute the logits after the tokens ``start + begin`` to ``start + end - 1``: [end - begin, vocab] fp32."""
        indices, slot = torch.arange(begin, end, device=self.hidden.device), self.sequence.adapter
        adapter_ids = torch.full_like(indices, slot, dtype=torch.int32) if slot >= 0 else None
        return self.model.logits(self.hidden, indices, adapter_ids).float()

    def normalized(self) -> Tensor:
        """Return ``hidden`` after the last norm."""
        return self.model.normalize(self.hidden)


class Request(ABC):
    """One request of the user and the sequences that are computed for it.

    Attributes:
        request_id: id by which the engine knows the request.
        sequences: the request's sequences, finished ones included.
    """

    request_id: str
    sequences: list[Sequence]

    @property
    @abstractmethod
    def unfinished(self) -> list[Sequence]:
        """The sequences that are still being computed; empty once the request has ended."""

    @abstractmethod
    def update(self, step: SequenceStep) -> None:
        """Process the result of a step for one of the request's sequences."""

    def end_step(self, scheduler: Scheduler) -> None:  # noqa: B027  (most requests' sequences are independent)
        """Act on all sequences together; called after :meth:`update` has been called for every result of a step."""

    def mark_reported(self) -> None:  # noqa: B027  (most requests have only one output)
        """Let the next output report what is new after the present state; called once an output will be delivered."""

    @abstractmethod
    def failure(self, message: str) -> Output:
        """Return a last output that reports an error; called if :meth:`finish` or :meth:`output` raised one."""

    @abstractmethod
    def finish(self, reason: str, stop_reason: int | str | None = None) -> None:
        """End the request unless it has ended already.

        Args:
            reason: the finish reason, such as ``"abort"``.
            stop_reason: the token or string that ended the request, or the message of an error.
        """

    @abstractmethod
    def output(self) -> Output | None:
        """Return the state to report to the user, or ``None`` if there is nothing to report yet."""
