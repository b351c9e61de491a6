"""``fastinfer bench end-to-end``, or just ``fastinfer bench``: speed and memory through the Python interface.

Method: random prompts are decoded greedily and end-of-sequence is ignored, so that every run does the same work and
none finds its prefix in the cache. Each prompt length has one warm-up, then ``repeats`` single requests, then
``repeats`` batches of ``requests`` requests at once. The table shows medians over the repeats; the JSON file has all
samples.
"""

import argparse
import contextlib
import itertools
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm

from fastinfer.benchmarks.process_memory import peak_memory
from fastinfer.benchmarks.report import PERCENTILES, percentile, print_plot, write_json
from fastinfer.errors import RequestError
from fastinfer.llm import LLM
from fastinfer.outputs import RequestOutput
from fastinfer.sampling_params import SamplingParams
from fastinfer.serving.prompt import Prompt
from fastinfer.utils.table import format_table


@dataclass(frozen=True)
class Single:
    """Times of a single request: seconds to its first token, and between successive tokens."""

    first_token_s: float
    inter_token_s: list[float]


@dataclass(frozen=True)
class Result:
    """Results at one prompt length. Rates are medians; latencies are percentiles over all samples.

    Attributes:
        prompt_tokens: length of each prompt.
        prompt_tokens_per_s: prompt length divided by the time to the first token.
        decode_tokens_per_s: rate of a single request from its first token to its last.
        first_token_s: median time to the first token.
        inter_token_s: percentile to seconds between tokens.
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
        gaps = [gap for run in single for gap in run.inter_token_s]
        return cls(
            prompt_tokens=prompt_tokens,
            prompt_tokens_per_s=prompt_tokens / first_token_s,
            decode_tokens_per_s=statistics.median(len(run.inter_token_s) / sum(run.inter_token_s) for run in single),
            first_token_s=first_token_s,
            inter_token_s={p: percentile(gaps, p) for p in PERCENTILES},
            throughput_tokens_per_s=batch_tokens / statistics.median(batch_s),
            single=single,
            batch_s=batch_s,
        )


def run(args: argparse.Namespace) -> int:
    """Run the benchmark, print its table, and write its files if ``--out`` is given."""
    start = time.perf_counter()
    llm = LLM(args.model, dtype=args.dtype, device="cpu")
    load_s = time.perf_counter() - start

    results = measure(llm, args.prompt_tokens, args.new_tokens, args.requests, args.repeats)
    peak = peak_memory()
    print(f"{args.model}, {args.dtype}: loaded in {load_s:.2f} s, peak memory {peak / 1e6:.0f} MB")
    print(format_table(_rows(results, args.requests)))
    if args.out is not None:
        settings = {
            name: getattr(args, name)
            for name in ("model", "dtype", "prompt_tokens", "new_tokens", "requests", "repeats")
        }
        out = Path(args.out)
        measured = {"load_s": load_s, "peak_memory": peak, "results": [asdict(result) for result in results]}
        print(write_json(out / "end_to_end.json", {"settings": settings, **measured}))
        print_plot(lambda: _plot(out / "end_to_end.png", args.model, results))
    return 0


def measure(
    llm: LLM, prompt_lengths: Sequence[int], new_tokens: int, requests: int, repeats: int, *, progress: bool = True
) -> list[Result]:
    """Measure a loaded model at each prompt length. The module's docstring describes the method."""
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    rng = random.Random(0)
    results = []
    with tqdm(total=len(prompt_lengths) * (1 + 2 * repeats), unit="run", disable=not progress) as bar:
        for length in prompt_lengths:

            def prompt(length: int = length) -> Prompt:
                return {"prompt_token_ids": [rng.randrange(100, 1000) for _ in range(length)]}

            bar.set_description(f"{length} prompt tokens: warm-up")
            _time_single(llm, prompt(), params)
            bar.update()
            single, batch_s = [], []
            for _ in range(repeats):
                bar.set_description(f"{length} prompt tokens: 1 request")
                single.append(_time_single(llm, prompt(), params))
                bar.update()
            for _ in range(repeats):
                bar.set_description(f"{length} prompt tokens: {requests} requests")
                prompts = [prompt() for _ in range(requests)]
                start = time.perf_counter()
                outputs = llm.generate(prompts, params)
                batch_s.append(time.perf_counter() - start)
                for output in outputs:
                    _check_length(output, params)
                bar.update()
            results.append(Result.of(length, single, batch_s, requests * new_tokens))
    return results


def _time_single(llm: LLM, prompt: Prompt, params: SamplingParams) -> Single:
    start = time.perf_counter()
    moments = []
    with contextlib.closing(llm.stream_outputs(prompt, params)) as outputs:
        for output in outputs:
            moments.append(time.perf_counter())
            if output.finished:
                _check_length(output, params)
    gaps = [after - before for before, after in itertools.pairwise(moments)]
    return Single(first_token_s=moments[0] - start, inter_token_s=gaps)


def _check_length(output: RequestOutput, params: SamplingParams) -> None:
    """Raise RequestError if tokens were requested that were never generated."""
    completion = output.outputs[0]
    if len(completion.token_ids) != params.max_tokens:
        reason = completion.stop_reason if completion.finish_reason == "error" else "the context is too short"
        raise RequestError(
            f"--new-tokens {params.max_tokens} after {len(output.prompt_token_ids)} prompt tokens: "
            f"got {len(completion.token_ids)} ({reason})"
        )


def _rows(results: list[Result], requests: int) -> list[list[str]]:
    head = ["prompt tokens", "prompt tokens/s", "first token ms", "decode tokens/s"]
    head += [f"p{p} ms" for p in PERCENTILES] + [f"{requests} at once tokens/s"]
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
    latency.set_title("Between tokens, 1 request, ms")
    for axes in (prompt, decode, latency):
        axes.set_xlabel("prompt tokens")
        axes.set_ylim(0, 1.1 * axes.dataLim.ymax)
    decode.legend()
    latency.legend()
    figure.savefig(path, dpi=120)
    return path
