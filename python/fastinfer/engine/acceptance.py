"""What speculation measures: how many drafts are right, and what steps cost."""

import statistics
from collections import deque

# A draft's chance before anything is known, and the weight of what the engine knows in a new sequence's estimate.
FIRST_ACCEPTANCE, PRIOR_WEIGHT = 0.5, 2.0


# The newest outcome's weight in the engine's own estimate, and how fast a sequence forgets.
LEARNING_RATE, MEMORY = 0.02, 0.9


class StepCosts:
    """Seconds of a step that decodes, by its number of tokens: measured, and guessed where it has not been.

    The guess: a step costs as much as reading the weights, and each token a third of that again (2 cores, 135M
    parameters in 4 bits: 1.83 times for 4 tokens, 2.8 for 8, 5.1 for 16).
    """

    SAMPLES, ENOUGH, STALE = 8, 3, 256

    def __init__(self) -> None:
        self._samples: dict[int, deque[float]] = {}
        self._medians: dict[int, float] = {}
        self._last_seen: dict[int, int] = {}
        self._num_steps = 0

    def add(self, num_tokens: int, seconds: float) -> None:
        self._num_steps += 1
        if num_tokens not in self._last_seen:
            self._last_seen[num_tokens] = self._num_steps
            return  # the first one records a graph
        self._last_seen[num_tokens] = self._num_steps
        samples = self._samples.setdefault(num_tokens, deque(maxlen=self.SAMPLES))
        samples.append(seconds)
        if len(samples) >= self.ENOUGH:
            self._medians[num_tokens] = statistics.median(samples)
        for stale in [n for n, step in self._last_seen.items() if self._num_steps - step > self.STALE]:
            del self._last_seen[stale]  # perhaps the machine was busy then
            self._samples.pop(stale, None)
            self._medians.pop(stale, None)

    def estimate(self, num_tokens: int) -> float:
        """Seconds; in units of their own while nothing is known."""
        if not self._medians:
            return 3.0 + num_tokens
        nearest = min(self._medians, key=lambda n: abs(n - num_tokens))
        return self._medians[nearest] * (3 + num_tokens) / (3 + nearest)


class Acceptance:
    """The share of drafts that were accepted lately."""

    def __init__(self, prior: float) -> None:
        self._accepted, self._total = prior * PRIOR_WEIGHT, PRIOR_WEIGHT

    def add(self, accepted: bool) -> None:
        self._accepted, self._total = MEMORY * self._accepted + accepted, MEMORY * self._total + 1

    @property
    def rate(self) -> float:
        return self._accepted / self._total
