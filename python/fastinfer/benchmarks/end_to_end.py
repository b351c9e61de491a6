"""``fastinfer bench end-to-end``, or just ``fastinfer bench``: speed and memory through the Python interface.

Method: random prompts are decoded greedily and end-of-sequence is ignored, so that every run does the same work and
none finds its prefix in the cache, nor in a folder that an earlier benchmark has filled. Each prompt length has one
warm-up, then ``repeats`` single requests, then ``repeats`` batches of ``requests`` requests at once. The table shows
medians over the repeats; the JSON file has all samples. With speculation an output may bring several tokens: rates
count tokens, and pauses are those between outputs.
"""

import argparse
import contextlib
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm

from fastinfer.benchmarks.process_memory import peak_memory
from fastinfer.benchmarks.replay import Job, Timeline
from fastinfer.benchmarks.report import PERCENTILES, percentile, print_plot, write_json
from fastinfer.errors import RequestError
from fastinfer.llm import LLM
from fastinfer.sampling_params import SamplingParams
from fastinfer.serving.prompt import Prompt
from fastinfer.utils.table import format_table


@dataclass(frozen=True)
class Single:
    """Times of a single request.

    Attributes:
        first_token_s: seconds to its first token.
        gaps_s: seconds between successive outputs.
        num_decoded: number of tokens after those of the first output.
    """

    first_token_s: float
    gaps_s: list[float]
    num_decoded: int


@dataclass(frozen=True)
class Result:
    """Results at one prompt length. Rates are medians; latencies are percentiles over all samples.

    Attributes:
        prompt_tokens: length of each prompt.
        prompt_tokens_per_s: prompt length divided by the time to the first token.
        decode_tokens_per_s: rate of a single request from its first token to its last.
        first_token_s: median time to the first token.
        inter_token_s: percentile to seconds between outputs.
        throughput_tokens_per_s: generated tokens of a batch divided by the time until its last request has finished.
        single: samples of single requests.
        batch_s: seconds of each batch.
    """

    prompt_tokens: int
    prompt_tokens_per_s: float
    decode_tokens_per_s: float
    first_token_s: float
    inter_token_s: dict[int, float]
    throughput_tokens_per_s: float
    single: list[Single]
    batch_s: list[float]

    @classmethod
    def of(cls, prompt_tokens: int, single: list[Single], batch_s: list[float], batch_tokens: int) -> "Result":
        first_token_s = statistics.median(run.first_token_s for run in single)
        gaps = [gap for run in single for gap in run.gaps_s]
        return cls(
            prompt_tokens=prompt_tokens,
            prompt_tokens_per_s=prompt_tokens / first_token_s,
            decode_tokens_per_s=statistics.median(run.num_decoded / sum(run.gaps_s) for run in single),
            first_token_s=first_token_s,
            inter_token_s={p: percentile(gaps, p) for p in PERCENTILES},
            throughput_tokens_per_s=batch_tokens / statistics.median(batch_s),
            single=single,
            batch_s=batch_s,
        )


def run(args: argparse.Namespace) -> int:
    """Run the benchmark, print its table, and write its files if ``--out`` is given."""
    start = time.perf_counter()
    llm = LLM(args.model, **args.engine_options)
    load_s = time.perf_counter() - start

    results = measure(llm, args.prompt_tokens, args.new_tokens, args.requests, args.repeats)
    peak = peak_memory()
    print(f"{args.model}: loaded in {load_s:.2f} s, peak memory {peak / 1e6:.0f} MB")
    print(format_table(_rows(results, args.requests)))
    if args.out is not None:
        settings = {
            name: getattr(args, name)
            for name in ("model", "engine_options", "prompt_tokens", "new_tokens", "requests", "repeats")
        }
        settings["devices"] = sorted(llm.engine.config.devices)
        out = Path(args.out)
        measured = {"load_s": load_s, "peak_memory": peak, "results": [asdict(result) for result in results]}
        print(write_json(out / "end_to_end.json", {"settings": settings, **measured}))
        print_plot(lambda: _plot(out / "end_to_end.png", args.model, results))
    return 0


def measure(
    llm: LLM, prompt_lengths: Sequence[int], new_tokens: int, requests: int, repeats: int, *, progress: bool = True
) -> list[Result]:
    """Measure a loaded model at each prompt length. The module's docstring describes the method.

    Raises:
        RequestError: the context is too short.
    """
    longest = max(prompt_lengths) + new_tokens
    if longest > llm.engine.max_model_len:
        raise RequestError(f"--context must be at least {longest} for these requests, got {llm.engine.max_model_len}")
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    rng = random.Random()  # without a seed: a folder of keys and values may have an earlier benchmark's prompts
    results = []
    with tqdm(total=len(prompt_lengths) * (1 + 2 * repeats), unit="run", disable=not progress) as bar:
        for length in prompt_lengths:

            def job(length: int = length) -> Job:
                return Job([rng.randrange(100, 1000) for _ in range(length)], params)

            bar.set_description(f"{length} prompt tokens: warm-up")
            _time_single(llm, job())
            bar.update()
            single, batch_s = [], []
            for _ in range(repeats):
                bar.set_description(f"{length} prompt tokens: 1 request")
                single.append(_time_single(llm, job()))
                bar.update()
            for _ in range(repeats):
                bar.set_description(f"{length} prompt tokens: {requests} requests")
                timelines = [Timeline(job()) for _ in range(requests)]
                prompts: list[Prompt] = [{"prompt_token_ids": timeline.job.prompt_token_ids} for timeline in timelines]
                start = time.perf_counter()
                outputs = llm.generate(prompts, params)
                batch_s.append(time.perf_counter() - start)
                for timeline, output in zip(timelines, outputs, strict=True):
                    timeline.add(batch_s[-1], output)  # checks that no token is missing
                bar.update()
            results.append(Result.of(length, single, batch_s, requests * new_tokens))
    return results


def _time_single(llm: LLM, job: Job) -> Single:
    timeline = Timeline(job)
    start = time.perf_counter()
    with contextlib.closing(llm.stream_outputs({"prompt_token_ids": job.prompt_token_ids}, job.params)) as outputs:
        for output in outputs:
            timeline.add(time.perf_counter() - start, output)
    return Single(timeline.first_token_s, timeline.gaps_s, timeline.counts[-1] - timeline.counts[0])


def _rows(results: list[Result], requests: int) -> list[list[str]]:
    head = ["prompt tokens", "prompt tokens/s", "first token ms", "decode tokens/s"]
    head += [f"between outputs p{p} ms" for p in PERCENTILES] + [f"{requests} at once tokens/s"]
    rows = [head]
    for r in results:
        row = [str(r.prompt_tokens), f"{r.prompt_tokens_per_s:.0f}", f"{r.first_token_s * 1e3:.1f}"]
        row.append(f"{r.decode_tokens_per_s:.1f}")
        row += [f"{r.inter_token_s[p] * 1e3:.2f}" for p in PERCENTILES]
        rows.append([*row, f"{r.throughput_tokens_per_s:.1f}"])
    return rows


def _plot(path: Path, title: str, results: list[Result]) -> Path:
    from matplotlib.figure import Figure

    lengths = [str(result.prompt_tokens) for result in results]
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    figure.suptitle(title)
    prompt, decode, latency = figure.subplots(1, 3)
    prompt.bar(lengths, [result.prompt_tokens_per_s for result in results], width=0.5)
    prompt.set_title("Prompt processing, tokens/s")
    decode.plot(lengths, [result.decode_tokens_per_s for result in results], "o-", label="1 request")
    decode.plot(lengths, [result.throughput_tokens_per_s for result in results], "o-", label="all requests at once")
    decode.set_title("Generation, tokens/s")
    for p in PERCENTILES:
        latency.plot(lengths, [result.inter_token_s[p] * 1e3 for result in results], "o-", label=f"p{p}")
    latency.set_title("Between outputs, 1 request, ms")
    for axes in (prompt, decode, latency):
        axes.set_xlabel("prompt tokens")
        axes.set_ylim(0, 1.1 * axes.dataLim.ymax)
    decode.legend()
    latency.legend()
    figure.savefig(path, dpi=120)
    return path
