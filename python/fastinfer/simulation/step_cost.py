"""The time of a step as a function of its work.

The formula is linear, as in Vidur's and Frontier's models of whole batches (Agrawal et al., 2024,
https://arxiv.org/abs/2405.05465): reading the weights takes the same time in each step, products take time per token,
attention per pair of a token and a position, and Python and the draw per sequence. Pairs of decoding sequences have a
coefficient of their own: each position's keys and values are read for one token alone, while a chunk of a prompt shares
them among its tokens.
"""

from dataclasses import dataclass
from typing import Protocol


class Work(Protocol):
    """Quantities of a step, see :class:`fastinfer.engine.stats.StepWork`."""

    num_seqs: int
    num_tokens: int
    decode_context: int
    prompt_context: int


@dataclass(frozen=True, slots=True)
class StepCost:
    """Coefficients of a step's time, in seconds.

    Attributes:
        step: per step, whatever it computes.
        token: per computed token.
        sequence: per sequence.
        decode_context: per position that a decoding token attends to.
        prompt_context: per pair of a token and a position that it attends to, in chunks of several tokens.
    """

    step: float
    token: float
    sequence: float
    decode_context: float
    prompt_context: float

    def seconds(self, work: Work) -> float:
        """Return the time of a step in seconds."""
        return (
            self.step
            + self.token * work.num_tokens
            + self.sequence * work.num_seqs
            + self.decode_context * work.decode_context
            + self.prompt_context * work.prompt_context
        )
