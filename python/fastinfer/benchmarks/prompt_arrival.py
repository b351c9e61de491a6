"""Delay of running streams by the arrival of a long prompt.

The delay is the longest pause of any stream while the prompt is processed, minus the usual pause before. It is compared
with the longest step of the same prompt alone: with chunked prefill, a stream waits for at most one chunk.
"""

import itertools
import math
import random
import statistics
from dataclasses import dataclass

from fastinfer.benchmarks.progress import Progress, silent
from fastinfer.benchmarks.replay import Job, Recorder
from fastinfer.benchmarks.report import Goal, median_ratio
from fastinfer.benchmarks.subject import Subject
from fastinfer.engine.engine import Engine
from fastinfer.sampling_params import SamplingParams

PROMPT_TOKENS = 1500
NEW_TOKENS = 2  # of the long prompt; its sequence is the longest
STREAMS = 4
STREAM_PROMPT_TOKENS = 32
SETTLED = 16  # number of tokens that each stream has generated when the prompt arrives


@dataclass(frozen=True)
class PromptArrival:
    """Results in seconds, one value per repeat.

    Attributes:
        prompt_tokens: length of the long prompt.
        streams: number of streams.
        chunk_tokens: largest number of tokens in a step.
        usual_gap_s: median pause between tokens of a stream before the prompt arrives.
        longest_gap_s: longest pause of any stream while the prompt is processed.
        chunk_s: longest step of the prompt alone.
        alone_s: time to the first token of the prompt alone.
        first_token_s: time to the first token of the prompt beside the streams.
    """

    prompt_tokens: int
    streams: int
    chunk_tokens: int
    usual_gap_s: list[float]
    longest_gap_s: list[float]
    chunk_s: list[float]
    alone_s: list[float]
    first_token_s: list[float]

    @property
    def delays_s(self) -> list[float]:
        return [longest - usual for longest, usual in zip(self.longest_gap_s, self.usual_gap_s, strict=True)]

    def rows(self) -> list[list[str]]:
        def ms(samples: list[float]) -> str:
            return f"{statistics.median(samples) * 1e3:.1f}"

        return [
            [f"a prompt of {self.prompt_tokens} arrives beside {self.streams} streams", "ms"],
            ["pause between a stream's tokens, before", ms(self.usual_gap_s)],
            ["longest pause meanwhile", ms(self.longest_gap_s)],
            [f"longest step of the prompt alone (chunks of {self.chunk_tokens})", ms(self.chunk_s)],
            ["the prompt's first token, alone", ms(self.alone_s)],
            ["the prompt's first token, beside the streams", ms(self.first_token_s)],
        ]

    def goals(self) -> list[Goal]:
        delay = median_ratio(self.delays_s, self.chunk_s)
        return [Goal(f"delay by a prompt of {self.prompt_tokens}, in chunks", delay, at_most=1.0)]


def measure(
    subject: Subject,
    repeats: int,
    progress: Progress = silent,
    *,
    prompt_tokens: int = PROMPT_TOKENS,
    streams: int = STREAMS,
    settled: int = SETTLED,
    chunk_tokens: int = 512,
) -> PromptArrival:
    """Measure the prompt alone and beside the streams, ``repeats`` times after a warm-up."""
    stream_prompt = min(STREAM_PROMPT_TOKENS, prompt_tokens)
    num_chunks = math.ceil(prompt_tokens / max(chunk_tokens - streams, 1))
    stream_tokens = settled + num_chunks + 8  # long enough for all streams to outlast the prompt
    engine = subject.make_engine(
        max_num_seqs=streams + 1,
        max_num_batched_tokens=chunk_tokens,
        max_model_len=max(prompt_tokens + NEW_TOKENS, stream_prompt + stream_tokens),
        enable_prefix_caching=False,
    )
    rng = random.Random(0)
    params = SamplingParams(temperature=0, max_tokens=stream_tokens, ignore_eos=True)
    samples = []
    for repeat in range(1 + repeats):
        progress("beside streams" if repeat else "warm-up")
        long_params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
        long_job = Job(subject.random_prompt(rng, prompt_tokens), long_params)
        jobs = [Job(subject.random_prompt(rng, stream_prompt), params) for _ in range(streams)]
        sample = (*_measure_alone(engine, long_job), *_measure_beside_streams(engine, long_job, jobs, settled))
        if repeat:
            samples.append(sample)
    chunk_s, alone_s, usual, longest, first = (list(column) for column in zip(*samples, strict=True))
    return PromptArrival(prompt_tokens, streams, chunk_tokens, usual, longest, chunk_s, alone_s, first)


def _measure_alone(engine: Engine, job: Job) -> tuple[float, float]:
    """Run a job alone; return its longest step and the time to its first token."""
    recorder = Recorder(engine)
    timeline = recorder.add(job)
    ends = [recorder.now()]
    while not timeline.moments:
        ends.append(recorder.step())
    while engine.has_unfinished:
        recorder.step()
    return max(after - before for before, after in itertools.pairwise(ends)), ends[-1]


def _measure_beside_streams(engine: Engine, long_job: Job, jobs: list[Job], settled: int) -> tuple[float, float, float]:
    """Run a job beside streams; return their usual and longest pauses, and the time to the job's first token."""
    recorder = Recorder(engine)
    streams = [recorder.add(job) for job in jobs]
    while min(len(stream.moments) for stream in streams) < settled:
        recorder.step()
    usual = statistics.median(gap for stream in streams for gap in stream.gaps_s)
    num_before = [len(stream.moments) for stream in streams]
    arrival = recorder.now()
    timeline = recorder.add(long_job)
    while not timeline.moments:
        recorder.step()
    first_token = timeline.moments[0]
    while engine.has_unfinished:
        recorder.step()
    # Count from the pause in which the prompt arrived to the one that ends after the prompt's last chunk.
    longest = max(
        after - before
        for stream, count in zip(streams, num_before, strict=True)
        for before, after in itertools.pairwise(stream.moments[count - 1 :])
        if before < first_token
    )
    return usual, longest, first_token - arrival
