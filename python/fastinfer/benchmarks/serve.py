"""``fastinfer bench serve``: latency and throughput of an OpenAI-compatible server.

Method: prompts of random words are answered greedily with a fixed number of tokens, where the server can be told to
ignore the end of sequence. A level is a number of streams at once; each stream sends a request as soon as its
last one is answered. Each level has a warm-up; then the levels take turns. Tokens are counted by the server. If an
answer fails, the runs before it are reported.
"""

import argparse
import asyncio
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fastinfer.benchmarks.load import Requests, Run, knows_ignore_eos, run_streams
from fastinfer.benchmarks.progress import Progress, show_progress, silent
from fastinfer.benchmarks.report import PERCENTILES, percentile, print_plot, write_json
from fastinfer.client.answer_stream import list_models
from fastinfer.client.endpoint import Endpoint
from fastinfer.utils.table import format_table


@dataclass(frozen=True)
class Level:
    """Results of one number of streams. Rates have one value per repeat; latencies cover the answers of all repeats.

    Attributes:
        streams: number of streams at once.
        answers: number of answers.
        short_answers: those with fewer tokens than requested.
        prompt_tokens: mean length of the prompts, with the chat template.
        tokens_per_s: generated tokens divided by the whole time, including the prompts.
        requests_per_s: answers divided by the same time.
        first_token_s: percentile to seconds until the first text.
        inter_token_s: percentile to seconds between outputs, for which a reader waits.
        per_token_s: percentile to the mean seconds per token of an answer, after its first token.
        tokens_per_output: mean number of tokens that arrive together.
        generator_cores: how much of a core the load generator took.
    """

    streams: int
    answers: int
    short_answers: int
    prompt_tokens: float
    tokens_per_s: list[float]
    requests_per_s: list[float]
    first_token_s: dict[int, float]
    inter_token_s: dict[int, float]
    per_token_s: dict[int, float]
    tokens_per_output: float
    generator_cores: list[float]

    @classmethod
    def of(cls, streams: int, new_tokens: int, runs: Sequence[Run]) -> "Level":
        answers = [answer for run in runs for answer in run.answers]
        gaps = [gap for answer in answers for gap in answer.gaps_s]
        per_token = [seconds for answer in answers if (seconds := answer.per_token_s) is not None]
        num_tokens, num_outputs = sum(a.new_tokens for a in answers), sum(len(a.moments) for a in answers)
        return cls(
            streams=streams,
            answers=len(answers),
            short_answers=sum(answer.new_tokens < new_tokens for answer in answers),
            prompt_tokens=statistics.mean(answer.prompt_tokens for answer in answers),
            tokens_per_s=[run.tokens_per_s for run in runs],
            requests_per_s=[run.requests_per_s for run in runs],
            first_token_s=_percentiles([answer.first_token_s for answer in answers]),
            inter_token_s=_percentiles(gaps),
            per_token_s=_percentiles(per_token),
            tokens_per_output=num_tokens / num_outputs,
            generator_cores=[run.generator_cores for run in runs],
        )


def run(args: argparse.Namespace) -> int:
    """Measure the server, print the table, and write the files if ``--out`` is given."""
    endpoint = Endpoint.parse(args.url, args.api_key)
    model = args.model or asyncio.run(list_models(endpoint))[0]
    is_chat = not args.completions
    ignore_eos = knows_ignore_eos(endpoint, model, is_chat=is_chat)
    requests = Requests(model, args.prompt_words, args.new_tokens, ignore_eos=ignore_eos, is_chat=is_chat)
    runs: dict[int, list[Run]] = {count: [] for count in args.streams}
    try:
        with show_progress("serve") as progress:
            measure(endpoint, requests, runs, args.requests, args.repeats, progress)
    finally:
        levels = [Level.of(count, args.new_tokens, done) for count, done in runs.items() if done]
        if levels:
            _report(args, model, ignore_eos, levels)
    return 0


def _report(args: argparse.Namespace, model: str, ignore_eos: bool, levels: list[Level]) -> None:
    """Print the table, and write the files if ``--out`` is given."""
    print(f"{model} at {args.url}: {levels[0].prompt_tokens:.0f} prompt tokens, {args.new_tokens} new tokens")
    print(format_table(_rows(levels)))
    num_short, num_answers = sum(level.short_answers for level in levels), sum(level.answers for level in levels)
    if num_short:
        print(f"{num_short} of {num_answers} answers ended before {args.new_tokens} tokens")
    if args.out is not None:
        names = ("url", "completions", "streams", "prompt_words", "new_tokens", "requests", "repeats")
        settings = {"model": model, "ignore_eos": ignore_eos, **{name: getattr(args, name) for name in names}}
        out = Path(args.out)
        print(write_json(out / "serve.json", {"settings": settings, "levels": [asdict(level) for level in levels]}))
        print_plot(lambda: _plot(out / "serve.png", f"{model}, {args.new_tokens} new tokens", levels))


def measure(
    endpoint: Endpoint,
    requests: Requests,
    runs: dict[int, list[Run]],
    requests_per_stream: int,
    repeats: int,
    progress: Progress = silent,
) -> None:
    """Measure each number of streams. The module's docstring describes the method.

    Args:
        endpoint: the server.
        requests: source of the requests.
        runs: the numbers of streams, and the runs so far, to which those of this call are added.
        requests_per_stream: number of requests that each stream sends.
        repeats: number of runs with each number of streams.
        progress: function that is called before each run.

    Raises:
        FastinferError: a request failed.
    """
    for repeat in range(1 + repeats):
        for count in runs:
            progress(f"{count} streams{'' if repeat else ': warm-up'}")
            result = run_streams(endpoint, requests, count, requests_per_stream if repeat else 1)
            if repeat:
                runs[count].append(result)


def _percentiles(samples: list[float]) -> dict[int, float]:
    """Return the percentiles, or none if there are no samples."""
    return {p: percentile(samples, p) for p in PERCENTILES} if samples else {}


def _rows(levels: list[Level]) -> list[list[str]]:
    head = ["streams", "tokens/s", "first token p50 ms", "p95", "p99"]
    head += ["between tokens p50 ms", "p95", "p99", "tokens per output", "generator, % of a core"]

    def ms(percentiles: dict[int, float], digits: int) -> list[str]:
        return [f"{percentiles[p] * 1e3:.{digits}f}" if percentiles else "-" for p in PERCENTILES]

    rows = [head]
    for level in levels:
        row = [str(level.streams), f"{statistics.median(level.tokens_per_s):.1f}"]
        row += ms(level.first_token_s, 0) + ms(level.inter_token_s, 2)
        generator = statistics.median(level.generator_cores)
        rows.append([*row, f"{level.tokens_per_output:.2f}", f"{generator * 100:.1f}"])
    return rows


def _plot(path: Path, title: str, levels: list[Level]) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    figure.suptitle(title)
    throughput, first, between = figure.subplots(1, 3)
    labels = [str(level.streams) for level in levels]
    throughput.plot(labels, [statistics.median(level.tokens_per_s) for level in levels], "o-")
    throughput.set_title("Generated tokens/s")
    for p in PERCENTILES:
        _plot_ms(first, labels, [level.first_token_s.get(p) for level in levels], f"p{p}")
        _plot_ms(between, labels, [level.inter_token_s.get(p) for level in levels], f"p{p}")
    first.set_title("First token, ms")
    between.set_title("Between tokens, ms")
    first.legend()
    between.legend()
    for axes in (throughput, first, between):
        axes.set_xlabel("streams at once")
        axes.set_ylim(bottom=0)
    figure.savefig(path, dpi=120)
    return path


def _plot_ms(axes: Any, labels: list[str], seconds: list[float | None], label: str) -> None:
    """Plot times; a level whose answers came at once has none."""
    axes.plot(labels, [math.nan if s is None else s * 1e3 for s in seconds], "o-", label=label)
