"""``fastinfer bench ablation``: one workload with one optimisation after another switched on.

The rows are defined in :mod:`fastinfer.benchmarks.ablation_rows`. By default all rows use hidden states in fp32 and a
KV cache in fp16. All use the fused kernels, the same token budget per step and recorded graphs. The first row therefore
shows these kernels without the optimisations, not a naive implementation.

Workload: requests that arrive together and share a system prompt; every second answer copies much of its prompt; output
lengths are mixed and equal in all rows. Rows with long prompts have another workload, see
:func:`fastinfer.benchmarks.ablation_row.make_jobs`, and are compared among each other. A first process checks all rows.
Each run of a row is then a new process, which loads the model, warms up, clears the prefix cache and measures; rows
take turns. If one fails, the others are reported as far as they have been measured. Rows without a KV cache
stop at a time limit. Their tokens/s then refer to texts shorter than the final ones, which makes these rows look faster
than they are.
"""

import argparse
import json
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fastinfer.benchmarks.ablation_row import Measured, Settings
from fastinfer.benchmarks.ablation_rows import ROWS, Row
from fastinfer.benchmarks.progress import show_progress
from fastinfer.benchmarks.report import median_ratio, percentile, print_plot, write_json
from fastinfer.errors import FastinferError, RequestError
from fastinfer.utils.programs import python_module
from fastinfer.utils.table import format_table

BATCH_SIZE = 8

Results = dict[str, list[Measured]]  # key of a row to its measurements, one per repeat


def run(args: argparse.Namespace) -> int:
    """Run the benchmark, print its table, and write its files if ``--out`` is given."""
    options = {"device": "cpu"} | args.engine_options
    settings = Settings(
        args.model,
        args.requests,
        args.new_tokens,
        options.pop("max_num_seqs", BATCH_SIZE),
        args.speculative_tokens,
        args.limit_seconds,
        args.document_tokens,
        args.sparse_attention,
        args.draft_model,
        options,
        args.threads,
    )
    rows = [row for row in ROWS if row.key in args.rows]
    results: Results = {row.key: [] for row in rows}
    try:
        with show_progress("ablation") as progress:
            progress("checks")
            settings.loading["device"] = _check_in_process(rows, settings)
            for repeat in range(args.repeats):
                for row in rows:
                    progress(f"{row.title}, {repeat + 1} of {args.repeats}")
                    results[row.key].append(_measure_in_process(row, settings))
    finally:
        measured = [row for row in rows if results[row.key]]
        if measured:
            _report(args, settings, measured, results)
    return 0


def _report(args: argparse.Namespace, settings: Settings, rows: Sequence[Row], results: Results) -> None:
    """Print the table of the rows that were measured, and write the files if ``--out`` is given."""
    print(format_table(_table_rows(rows, results)))
    for row in rows:
        print(f"{row.title}: {row.meaning}{_notes(results[row.key])}")
    if args.out is not None:
        out = Path(args.out)
        described = {row.key: asdict(row) | {"runs": [asdict(run) for run in results[row.key]]} for row in rows}
        measured = {"settings": asdict(settings) | {"repeats": args.repeats}, "rows": described}
        print(write_json(out / "ablation.json", measured))
        print_plot(lambda: _plot(out / "ablation.png", args.model, rows, results))


def tokens_per_s(runs: Sequence[Measured]) -> list[float]:
    """Return the generated tokens per second of each run."""
    return [run.num_tokens / run.seconds for run in runs]


def gain(row: Row, rows: Sequence[Row], results: Results) -> float:
    """Return the ratio of a row's tokens/s to its baseline's, as the median over the repeats that both have."""
    speeds, others = tokens_per_s(results[row.key]), tokens_per_s(results[baseline(row, rows).key])
    count = min(len(speeds), len(others))
    return median_ratio(speeds[:count], others[:count])


def baseline(row: Row, rows: Sequence[Row]) -> Row:
    """Return the row that a row's gain is relative to: the first one, or its own baseline.

    That is the row itself if its baseline was not measured: others have another workload.
    """
    if row.baseline is None:
        return rows[0]
    return next((other for other in rows if other.key == row.baseline), row)


def check_complete(row: Row, run: Measured) -> None:
    """Check that all tokens were generated.

    Raises:
        RequestError: tokens are missing although the row has no time limit, or there are none at all.
    """
    if run.num_tokens == 0 or (row.kv_cache and run.num_tokens != run.num_requested):
        raise RequestError(f"{row.title}: expected {run.num_requested} tokens, got {run.num_tokens}")


def _check_in_process(rows: Sequence[Row], settings: Settings) -> str:
    """Check that all rows can be measured, and return the device of the model."""
    device: str = _run_process("ablation", {"rows": [row.key for row in rows]}, settings)["device"]
    return device


def _measure_in_process(row: Row, settings: Settings) -> Measured:
    measured = Measured(**_run_process(row.title, {"row": row.key}, settings))
    check_complete(row, measured)
    return measured


def _run_process(title: str, message: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """Send a message to a process of :mod:`fastinfer.benchmarks.ablation_row`, and return its answer."""
    text = json.dumps({**message, "settings": asdict(settings)})
    process = subprocess.run(
        [*python_module("fastinfer.benchmarks.ablation_row"), text], capture_output=True, text=True
    )
    if process.returncode:
        lines = process.stderr.strip().splitlines() or [f"its process ended with the code {process.returncode}"]
        raise FastinferError(f"{title}: {lines[-1]}")
    answer: dict[str, Any] = json.loads(process.stdout)
    return answer


def _table_rows(rows: Sequence[Row], results: Results) -> list[list[str]]:
    head = ["", "tokens/s", f"times {rows[0].title}", "published", "first token s", "between ms p50", "p99"]
    lines = [[*head, "weights MB", "peak memory MB"]]
    for row in rows:
        runs = results[row.key]
        line = [row.title, f"{statistics.median(tokens_per_s(runs)):.1f}", _gain_text(row, rows, results)]
        claim = _claim(row, rows)
        line.append("" if claim is None else f"{claim:g}")
        # Requests that the row did not reach in time would have waited longest.
        whole = all(run.num_tokens == run.num_requested for run in runs)
        line.append(f"{statistics.median(s for run in runs for s in run.first_token_s):.2f}" if whole else "-")
        gaps = [gap for run in runs for gap in run.gaps_s]
        line += [f"{percentile(gaps, p) * 1e3:.1f}" if gaps else "-" for p in (50, 99)]
        line += [f"{runs[0].weight_bytes / 1e6:.0f}", f"{max(run.peak_memory for run in runs) / 1e6:.0f}"]
        lines.append(line)
    return lines


def _gain_text(row: Row, rows: Sequence[Row], results: Results) -> str:
    other = baseline(row, rows)
    if other is row is not rows[0]:
        return ""
    text = f"{gain(row, rows, results):.2f}"
    return text if other is rows[0] else f"{text} ({other.title})"


def _claim(row: Row, rows: Sequence[Row]) -> float | None:
    """Return the published gain of a row, which is relative to no optimisation at all."""
    return row.claim if rows[0].key == "none" else None


def _notes(runs: Sequence[Measured]) -> str:
    """Describe conditions of the runs that the reader must know to interpret the figures."""
    notes = []
    fewest = min(runs, key=lambda run: run.num_tokens)
    if fewest.num_tokens < fewest.num_requested:
        notes.append(f"stopped after {fewest.num_tokens} of {fewest.num_requested} tokens")
    if fewest.num_cached_tokens:
        notes.append(f"{fewest.num_cached_tokens} prompt tokens from the cache")
    if fewest.num_drafted:
        notes.append(f"{fewest.num_accepted} of {fewest.num_drafted} drafts accepted")
    notes.append(f"{fewest.num_after_end / fewest.num_tokens:.0%} of the tokens after the answer's own end")
    return f" ({'; '.join(notes)})"


def _plot(path: Path, title: str, rows: Sequence[Row], results: Results) -> Path:
    from matplotlib.figure import Figure

    names = [row.title for row in rows][::-1]  # horizontal bars are drawn from the bottom
    speeds = [statistics.median(tokens_per_s(results[row.key])) for row in rows][::-1]
    gains = [_gain_text(row, rows, results) for row in rows][::-1]
    memory = [max(run.peak_memory for run in results[row.key]) / 1e6 for row in rows][::-1]
    figure = Figure(figsize=(11, 1.6 + 0.4 * len(rows)), layout="constrained")
    figure.suptitle(title)
    speed_axes, memory_axes = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    bars = speed_axes.barh(range(len(rows)), speeds, height=0.5, label="measured")
    labels = [f"{speed:.1f}, x {times}" for speed, times in zip(speeds, gains, strict=True)]
    speed_axes.bar_label(bars, labels, padding=3)
    claims = {len(rows) - 1 - index: _claim(row, rows) for index, row in enumerate(rows)}
    claimed = {index: claim * speeds[-1] for index, claim in claims.items() if claim is not None}
    if claimed:
        below = [index - 0.35 for index in claimed]
        speed_axes.barh(below, list(claimed.values()), height=0.15, color="C1", label="as published ablations claim")
        figure.legend(loc="outside lower left", ncols=2)
    speed_axes.set_yticks(range(len(rows)), names)
    speed_axes.set_title("Tokens/s")
    speed_axes.set_xlim(0, 1.25 * max(*speeds, *claimed.values(), 0.0))
    sizes = memory_axes.barh(range(len(rows)), memory, height=0.5, color="0.75")
    memory_axes.bar_label(sizes, [f"{size:.0f}" for size in memory], padding=3)
    memory_axes.set_title("Peak memory, MB")
    memory_axes.set_xlim(0, 1.25 * max(memory))
    figure.savefig(path, dpi=120)
    return path
