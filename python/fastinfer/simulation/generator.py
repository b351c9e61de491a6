"""Generator of traces: Poisson arrivals, lengths by distribution, shared prefixes."""

import math
import random
from dataclasses import dataclass

from fastinfer.errors import RequestError
from fastinfer.simulation.trace import TraceRequest
from fastinfer.utils.checks import show

MAX_SIGMA = 10.0  # a larger one would leave hardly any lengths but the smallest and the largest


@dataclass(frozen=True, slots=True)
class Lengths:
    """Distribution of lengths in tokens.

    Attributes:
        low, high: smallest and largest length.
        median, sigma: median and shape of a log-normal distribution, which is cut at ``low`` and ``high``; without a
            median the logarithms of lengths are uniformly distributed between theirs.
    """

    low: int
    high: int
    median: float | None = None
    sigma: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """Parse ``N``, ``LOW:HIGH`` or ``LOW:HIGH:MEDIAN:SIGMA``.

        Raises:
            RequestError: the text is none of these.
        """
        try:
            numbers = [float(part) for part in text.split(":")]
            if len(numbers) not in (1, 2, 4) or any(int(bound) != bound for bound in numbers[:2]):
                raise ValueError
            low, high = int(numbers[0]), int(numbers[min(1, len(numbers) - 1)])
            median, sigma = numbers[2:] or (None, 0.0)
            is_valid = 1 <= low <= high < 2**31 and 0 <= sigma <= MAX_SIGMA
            if not is_valid or (median is not None and not low <= median <= high):
                raise ValueError
        except (ValueError, OverflowError):
            raise RequestError(
                "expected N, LOW:HIGH or LOW:HIGH:MEDIAN:SIGMA with 1 <= LOW <= MEDIAN <= HIGH and "
                f"0 <= SIGMA <= {MAX_SIGMA:g}, got {show(text)}"
            ) from None
        return cls(low, high, median, sigma)

    def draw(self, rng: random.Random) -> int:
        """Draw a length."""
        if self.median is not None:
            return min(max(round(self.median * math.exp(rng.gauss(0.0, self.sigma))), self.low), self.high)
        if self.low == self.high:
            return self.low
        return min(int(math.exp(rng.uniform(math.log(self.low), math.log(self.high + 1)))), self.high)


def generate_trace(
    num_requests: int,
    rate: float | None,
    prompt_tokens: Lengths,
    output_tokens: Lengths,
    *,
    num_prefixes: int = 0,
    prefix_tokens: int = 0,
    seed: int = 0,
) -> list[TraceRequest]:
    """Generate a trace; the same arguments give the same trace.

    Args:
        num_requests: number of requests.
        rate: mean number of arrivals per second, in a Poisson process; ``None`` if all arrive at once.
        prompt_tokens: lengths of the prompts, without the shared prefix.
        output_tokens: lengths of the outputs.
        num_prefixes: number of shared prefixes, one of which each prompt begins with, all equally often; 0 for none.
        prefix_tokens: length of each prefix in tokens.
        seed: random seed, at least 0.
    """
    rng = random.Random(seed)
    requests, arrival_s = [], 0.0
    for _ in range(num_requests):
        if rate is not None:
            arrival_s += rng.expovariate(rate)
        prefix = f"prefix-{rng.randrange(num_prefixes)}" if num_prefixes else None
        shared = prefix_tokens if num_prefixes else 0
        length = shared + prompt_tokens.draw(rng)
        requests.append(TraceRequest(arrival_s, length, output_tokens.draw(rng), prefix, shared))
    return requests
