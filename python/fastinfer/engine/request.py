"""The interface between the engine and every kind of request."""

from abc import ABC, abstractmethod
from collections.abc import Sequence as List
from typing import NamedTuple

from torch import Tensor

from fastinfer.engine.sampled_token import SampledToken, TokenLogprob
from fastinfer.engine.scheduler import Scheduler
from fastinfer.engine.sequence import Sequence
from fastinfer.outputs import PrefillOutput, RequestOutput

Output = RequestOutput | PrefillOutput


class SequenceStep(NamedTuple):
    """The result of one step for one sequence.

    Attributes:
        sequence: the sequence that was computed.
        start: position of the first token that was computed.
        tokens: drawn tokens to append; empty until the prompt is fully computed.
        is_last: whether all tokens that the sequence had are computed now.
        prompt_logprobs: log-probabilities of tokens of the prompt from ``Sequence.next_prompt_logprob`` on, each with
            those of the likeliest tokens.
        pooled: what ``Sequence.pooling`` asks for, [hidden] float64: the sum over the tokens that were computed, or the
            last token's hidden state; ``None`` for nothing.
    """

    sequence: Sequence
    start: int
    tokens: list[SampledToken]
    is_last: bool
    prompt_logprobs: List[list[TokenLogprob]] = ()
    pooled: Tensor | None = None


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

    @property
    def num_generated_tokens(self) -> int:
        """Number of tokens that the request's sequences have got since its start."""
        return sum(sequence.num_output_tokens for sequence in self.sequences)

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
