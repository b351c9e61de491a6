"""One row of the ablation, in a process of its own so that its memory is its own:
``python -m fastinfer.benchmarks.ablation_row SETTINGS`` prints the result, both as JSON.
"""

import json
import random
import sys
from dataclasses import asdict, dataclass, replace
from typing import Any

from fastinfer.benchmarks.ablation_rows import ROWS, Row
from fastinfer.benchmarks.no_kv_cache import replay_without_kv_cache
from fastinfer.benchmarks.process_memory import peak_memory, reset_peak_memory
from fastinfer.benchmarks.prompts import COPY_HEAVY, OTHERS, SYSTEM
from fastinfer.benchmarks.repack import repack, weight_bytes
from fastinfer.benchmarks.replay import Job, Replay, replay
from fastinfer.benchmarks.subject import Subject
from fastinfer.engine.engine import Engine
from fastinfer.errors import FastinferError
from fastinfer.models.decoder import Decoder
from fastinfer.sampling_params import SamplingParams

WARM_UP_S = 1.0  # limit of the rows without a KV cache, which have no graphs: a token warms all


@dataclass(frozen=True)
class Settings:
    """What all rows share.

    Attributes:
        model: a name or path.
        requests: that come at once.
        new_tokens: the most of a request; each has between a quarter of it and all.
        batch_size: requests that run at the same time, where a row runs several.
        speculative_tokens: guessed at most.
        limit_s: after so long the rows without a KV cache stop.
    """

    model: str
    requests: int
    new_tokens: int
    batch_size: int
    speculative_tokens: int
    limit_s: float


@dataclass(frozen=True)
class Measured:
    """One run of a row.

    Attributes:
        seconds, num_tokens, num_requested: how long it took, what was generated, and what was asked for; fewer only
            where the time limit came first.
        first_token_s, gaps_s: of each request, from the common arrival; of each token.
        weight_bytes, peak_memory: in bytes; the latter of the process while it ran.
        num_after_end: tokens generated after a text had come to its own end.
        num_cached_tokens, num_drafted, num_accepted: by the prefix cache and by speculation.
    """

    seconds: float
    num_tokens: int
    num_requested: int
    first_token_s: list[float]
    gaps_s: list[float]
    weight_bytes: int
    peak_memory: int
    num_after_end: int
    num_cached_tokens: int
    num_drafted: int
    num_accepted: int


def make_jobs(subject: Subject, requests: int, new_tokens: int) -> list[Job]:
    """A system prompt before everything, copy-heavy questions and others in turns, and answers of mixed lengths.

    End-of-sequence is ignored: with other weights an answer is another, but its length has to be the same.
    """
    rng = random.Random(0)
    messages = [message for pair in zip(COPY_HEAVY, OTHERS, strict=True) for message in pair]
    jobs = []
    for index in range(requests):
        params = SamplingParams(
            temperature=0, max_tokens=rng.randint(max(new_tokens // 4, 1), new_tokens), ignore_eos=True
        )
        prompt = subject.chat_prompt(messages[index % len(messages)], SYSTEM)
        jobs.append(Job(prompt, params))
    return jobs


def measure(subject: Subject, row: Row, settings: Settings, jobs: list[Job]) -> Measured:
    """Warm up and run a row on a model whose weights have the row's form already."""
    new_tokens = [job.params.max_tokens or 0 for job in jobs]
    longest = max(len(job.prompt_token_ids) + count for job, count in zip(jobs, new_tokens, strict=True))
    batch_size = 1 if row.batching is None else settings.batch_size
    engine = subject.engine(
        max_model_len=longest,
        max_num_seqs=batch_size,
        batching=row.batching if row.batching and row.kv_cache else "continuous",
        enable_prefix_caching=row.prefix_caching,
        num_speculative_tokens=settings.speculative_tokens if row.speculation else 0,
    )
    _run(engine, row, _warm_up(jobs[:batch_size]), batch_size, WARM_UP_S)
    engine.block_manager.reset_prefix_cache()
    before = engine.stats()
    reset_peak_memory()
    run = _run(engine, row, jobs, batch_size, settings.limit_s)
    after = engine.stats()
    decoder = subject.model
    return Measured(
        seconds=run.seconds,
        num_tokens=run.num_tokens,
        num_requested=sum(new_tokens),
        first_token_s=[timeline.first_token_s for timeline in run.timelines if timeline.moments],
        gaps_s=run.gaps_s,
        weight_bytes=weight_bytes(decoder) if isinstance(decoder, Decoder) else 0,
        peak_memory=peak_memory(),
        num_after_end=sum(_num_after_end(t.token_ids, subject.tokenizer.eos_ids) for t in run.timelines),
        num_cached_tokens=sum(timeline.num_cached_tokens for timeline in run.timelines),
        num_drafted=after.num_drafted_tokens - before.num_drafted_tokens,
        num_accepted=after.num_accepted_tokens - before.num_accepted_tokens,
    )


def _warm_up(jobs: list[Job]) -> list[Job]:
    """The same prompts, ending one after the other, the last one first: every batch size occurs, and has its graph."""
    lengths = [min(2 + 2 * (len(jobs) - index), job.params.max_tokens or 0) for index, job in enumerate(jobs)]
    return [replace(job, params=replace(job.params, max_tokens=n)) for job, n in zip(jobs, lengths, strict=True)]


def _run(engine: Engine, row: Row, jobs: list[Job], batch_size: int, limit_s: float) -> Replay:
    return replay(engine, jobs) if row.kv_cache else replay_without_kv_cache(engine, jobs, batch_size, limit_s)


def _num_after_end(token_ids: list[int], eos_ids: frozenset[int]) -> int:
    ends = [index for index, token_id in enumerate(token_ids) if token_id in eos_ids]
    return len(token_ids) - ends[0] - 1 if ends else 0


def main(message: dict[str, Any]) -> Measured:
    settings = Settings(**message["settings"])
    row = next(row for row in ROWS if row.key == message["row"])
    loaded = Subject.load(settings.model, "auto")
    assert isinstance(loaded.model, Decoder)
    subject = replace(loaded, model=repack(loaded.model, row.weights))
    del loaded  # its weights are not the row's memory
    return measure(subject, row, settings, make_jobs(subject, settings.requests, settings.new_tokens))


if __name__ == "__main__":
    try:
        print(json.dumps(asdict(main(json.loads(sys.argv[1])))))
    except FastinferError as error:
        sys.exit(str(error))
