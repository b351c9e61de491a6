"""Generation without a KV cache: every token is a new request whose prompt is the whole text so far.

This measures the cost of recomputing the text with the same kernels. Logits are computed for the last token only.
"""

import dataclasses
import time

from fastinfer.benchmarks.replay import Job, Replay, Timeline
from fastinfer.engine.engine import Engine
from fastinfer.errors import RequestError
from fastinfer.outputs import RequestOutput


def replay_without_kv_cache(engine: Engine, jobs: list[Job], batch_size: int, limit_s: float) -> Replay:
    """Run jobs in batches, each to its end before the next one starts.

    After ``limit_s`` seconds the run stops. The timelines then end early, and those of jobs not reached are empty.

    Args:
        engine: engine without prefix cache.
        jobs: greedy jobs that ignore end-of-sequence; their arrival times are ignored.
        batch_size: number of jobs that run at the same time.
        limit_s: time limit in seconds, checked after each token.

    Raises:
        RequestError: the engine has a prefix cache, or a job can never be served or has failed.
    """
    if engine.config.enable_prefix_caching:
        raise RequestError("enable_prefix_caching: expected False for generation without a KV cache, got True")
    timelines = [Timeline(job) for job in jobs]
    start = time.perf_counter()
    elapsed = 0.0
    for first in range(0, len(jobs), batch_size):
        growing = timelines[first : first + batch_size]
        while growing and elapsed < limit_s:
            elapsed = _add_tokens(engine, growing, start)
            growing = [
                timeline for timeline in growing if len(timeline.token_ids) < (timeline.job.params.max_tokens or 0)
            ]
    return Replay(elapsed, timelines)


def _add_tokens(engine: Engine, timelines: list[Timeline], start: float) -> float:
    """Generate one more token for each timeline and return the time when this is done."""
    by_id = {}
    for timeline in timelines:
        params = dataclasses.replace(timeline.job.params, max_tokens=1)
        by_id[engine.add_request(timeline.job.prompt_token_ids + timeline.token_ids, params)] = timeline
    moment = 0.0
    while by_id:
        outputs = engine.step()
        moment = time.perf_counter() - start
        for output in outputs:
            assert isinstance(output, RequestOutput)
            completion, timeline = output.outputs[0], by_id.pop(output.request_id)
            if len(completion.token_ids) != 1:
                raise RequestError(f"expected a token, got none ({completion.stop_reason})")
            timeline.token_ids.append(completion.token_ids[0])
            timeline.moments.append(moment)
            timeline.counts.append(len(timeline.token_ids))
    return moment
