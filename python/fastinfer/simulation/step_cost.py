"""The time of a step as a function of its work.

The function is linear, like the models of a batch's time in Vidur (Agrawal et al., 2024,
https://arxiv.org/abs/2405.05465), but of a whole step instead of single operators. Reading the weights takes the same
time in each step, products take time per token, attention takes time per pair of a token and a position.

Decoding sequences, which compute one token each, have coefficients of their own. A position's keys and values are read
for that token alone, while a chunk of a prompt shares them; and a short chunk takes more time per token than a long
one, which is what its time per sequence stands for.
"""

from dataclasses import dataclass
from typing import Protocol


class Work(Protocol):
    """Quantities of a step, see :class:`fastinfer.engine.stats.StepWork`."""

    num_seqs: int
    num_tokens: int
    num_decodes: int
    decode_context: int
    prompt_context: int


@dataclass(frozen=True, slots=True)
class StepCost:
    """Coefficients of a step's time, in seconds.

    Attributes:
        step: per step, whatever it computes.
        decode_sequence: per sequence that computes one token, this token included.
        prompt_sequence: per sequence that computes several tokens.
        prompt_token: per token of these sequences.
        decode_context: per position that the token of a decoding sequence attends to.
        prompt_context: per pair of a token and a position that it attends to, of the other sequences.
    """

    step: float
    decode_sequence: float
    prompt_sequence: float
    prompt_token: float
    decode_context: float
    prompt_context: float

    def seconds(self, work: Work) -> float:
        """Return the time of a step in seconds."""
        return (
            self.step
            + self.decode_sequence * work.num_decodes
            + self.prompt_sequence * (work.num_seqs - work.num_decodes)
            + self.prompt_token * (work.num_tokens - work.num_decodes)
            + self.decode_context * work.decode_context
            + self.prompt_context * work.prompt_context
        )
