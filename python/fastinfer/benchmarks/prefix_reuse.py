"""Time to the first token of a request that shares a prefix with an earlier request.

Each pair of requests has a new random prefix and two different tails. Requests run one after the other.
"""

import random
import statistics
from dataclasses import dataclass

from fastinfer.benchmarks.progress import Progress, silent
from fastinfer.benchmarks.replay import Job, Timeline, replay
from fastinfer.benchmarks.report import Goal, median_ratio
from fastinfer.benchmarks.subject import Subject
from fastinfer.errors import RequestError
from fastinfer.sampling_params import SamplingParams

PREFIX_TOKENS = 1000
TAIL_TOKENS = 16


@dataclass(frozen=True)
class PrefixReuse:
    """Seconds to the first token of the first and second request of each pair, one pair per repeat."""

    prefix_tokens: int
    tail_tokens: int
    first_s: list[float]
    second_s: list[float]

    def rows(self) -> list[list[str]]:
        return [
            [f"prefix of {self.prefix_tokens}, tail of {self.tail_tokens} tokens", "first token ms"],
            ["first request", f"{statistics.median(self.first_s) * 1e3:.1f}"],
            ["second request", f"{statistics.median(self.second_s) * 1e3:.1f}"],
        ]

    def goals(self) -> list[Goal]:
        ratio = median_ratio(self.second_s, self.first_s)
        return [Goal(f"first token after a cached prefix of {self.prefix_tokens}, over without", ratio, at_most=0.2)]


def measure(
    subject: Subject,
    repeats: int,
    progress: Progress = silent,
    *,
    prefix_tokens: int = PREFIX_TOKENS,
    tail_tokens: int = TAIL_TOKENS,
) -> PrefixReuse:
    """Measure ``repeats`` pairs after one warm-up pair."""
    engine = subject.make_engine(max_num_seqs=2, max_model_len=prefix_tokens + tail_tokens + 1)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    rng = random.Random(0)
    # Only whole blocks of the prefix are reused; the tail fills the last one.
    expected = prefix_tokens // engine.config.block_size * engine.config.block_size

    def run(prefix: list[int]) -> Timeline:
        return replay(engine, [Job(prefix + subject.random_prompt(rng, tail_tokens), params)]).timelines[0]

    first_s, second_s = [], []
    for repeat in range(1 + repeats):
        progress("prefix" if repeat else "warm-up")
        prefix = subject.random_prompt(rng, prefix_tokens)
        first, second = run(prefix), run(prefix)
        if first.num_cached_tokens or second.num_cached_tokens < expected:
            raise RequestError(
                f"the prefix cache: expected 0 and then {expected} tokens, "
                f"got {first.num_cached_tokens} and {second.num_cached_tokens}"
            )
        if repeat:
            first_s.append(first.first_token_s)
            second_s.append(second.first_token_s)
    return PrefixReuse(prefix_tokens, tail_tokens, first_s, second_s)
