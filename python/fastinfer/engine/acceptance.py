"""Measurements for speculation: the share of accepted drafts and the costs of steps."""

import statistics
from collections import deque

# Assumed acceptance rate before any draft was verified.
FIRST_ACCEPTANCE = 0.5
# Weight of the prior in a new sequence's estimate, in drafts.
PRIOR_WEIGHT = 2.0
# Factor by which the weight of a sequence's earlier drafts decays with each new one.
DECAY = 0.9
# Weight of the newest draft in the engine's overall estimate.
LEARNING_RATE = 0.02


class StepCosts:
    """Measured times of decode steps by their number of tokens.

    Other times are extrapolated from the nearest measured one by a linear model: reading the weights takes 3 units, and
    each token 1 unit. (Times relative to 1 token, measured on 2 cores with a 4-bit model of 135M parameters: 1.83 for
    4 tokens, 2.8 for 8, 5.1 for 16.)

    Attributes:
        SAMPLES: number of latest times of which the median is taken.
        ENOUGH: number of times from which on the median is used.
        STALE: number of steps after which times are dropped if their number of tokens did not occur again.
    """

    SAMPLES, ENOUGH, STALE = 8, 3, 256

    def __init__(self) -> None:
        self._samples: dict[int, deque[float]] = {}
        self._medians: dict[int, float] = {}
        self._last_seen: dict[int, int] = {}
        self._num_steps = 0

    def add(self, num_tokens: int, seconds: float) -> None:
        """Record the time of a step."""
        self._num_steps += 1
        if num_tokens not in self._last_seen:
            self._last_seen[num_tokens] = self._num_steps
            return  # the first step of a size records a graph, which takes longer
        self._last_seen[num_tokens] = self._num_steps
        samples = self._samples.setdefault(num_tokens, deque(maxlen=self.SAMPLES))
        samples.append(seconds)
        if len(samples) >= self.ENOUGH:
            self._medians[num_tokens] = statistics.median(samples)
        for stale in [n for n, step in self._last_seen.items() if self._num_steps - step > self.STALE]:
            del self._last_seen[stale]  # the machine may have been busy then
            self._samples.pop(stale, None)
            self._medians.pop(stale, None)

    def estimate(self, num_tokens: int) -> float:
        """Return the expected time of a step: in seconds, or in arbitrary units before anything was measured."""
        if not self._medians:
            return 3.0 + num_tokens
        nearest = min(self._medians, key=lambda n: abs(n - num_tokens))
        return self._medians[nearest] * (3 + num_tokens) / (3 + nearest)


class Acceptance:
    """Moving average of the share of accepted drafts.

    Args:
        prior: expected share before the first draft.
    """

    def __init__(self, prior: float) -> None:
        self._accepted, self._total = prior * PRIOR_WEIGHT, PRIOR_WEIGHT

    def add(self, accepted: bool) -> None:
        """Record the outcome of one draft."""
        self._accepted, self._total = DECAY * self._accepted + accepted, DECAY * self._total + 1

    @property
    def rate(self) -> float:
        """The current share of accepted drafts, from 0 to 1."""
        return self._accepted / self._total
