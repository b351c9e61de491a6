"""``fastinfer bench throughput``: gains and costs of batching, prefix reuse, speculation and grammars.

Each section is a module, which measures its alternatives in turns, after a warm-up, on equal work.
"""

import argparse
import itertools
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fastinfer.benchmarks import batch_sizes, policies, prefix_reuse, prompt_arrival, speculation, structured
from fastinfer.benchmarks.progress import Progress, show_progress
from fastinfer.benchmarks.replay import longest_sequence
from fastinfer.benchmarks.report import Goal, goal_rows, print_plot, write_json
from fastinfer.benchmarks.subject import Subject
from fastinfer.utils.table import format_table

MAX_NUM_SEQS = 8  # of the mixed trace


def run(args: argparse.Namespace) -> int:
    """Run the chosen sections, print their tables, and write their files if ``--out`` is given."""
    if "json" in args.only:
        structured.check_installed()  # checked first, because the other sections take long
    loading = {name: value for name, value in args.engine_options.items() if name != "max_num_seqs"}
    subject = Subject.load(args.model, **loading)
    for name in args.only:
        subject.check_context(LONGEST[name](subject, args), f"the section {name}")
    settings = {name: value for name, value in vars(args).items() if name not in ("command", "module", "out")}
    settings["device"] = subject.device
    path = None if args.out is None else Path(args.out) / "throughput.json"
    results: dict[str, Any] = {}
    goals: list[Goal] = []
    for name in args.only:
        with show_progress(name) as progress:
            results[name] = SECTIONS[name](subject, args, progress)
        print(f"\n{name}\n{format_table(results[name].rows())}", flush=True)
        goals += results[name].goals()
        if path is not None:  # written after each section, because all of them take long
            measured = {name: asdict(result) for name, result in results.items()}
            write_json(path, {"settings": settings, "goals": [goal.as_dict() for goal in goals], "results": measured})
    print(f"\n{format_table(goal_rows(goals))}")
    if path is not None:
        print(path)
        if "batch" in results:
            print_plot(lambda: results["batch"].plot(path.with_suffix(".png"), args.model))
    return 0


def _policies(subject: Subject, args: argparse.Namespace, progress: Progress) -> policies.Policies:
    jobs = policies.mixed_trace(subject, args.requests, args.rate)
    max_num_seqs = args.engine_options.get("max_num_seqs", MAX_NUM_SEQS)
    return policies.measure(subject, jobs, args.rate, max_num_seqs, args.repeats, progress)


# Each result has rows() for a table, and goals().
SECTIONS: dict[str, Callable[[Subject, argparse.Namespace, Progress], Any]] = {
    "batch": lambda subject, args, progress: batch_sizes.measure(
        subject, args.batch_sizes, args.prompt_tokens, args.new_tokens, args.repeats, progress
    ),
    "policies": _policies,
    "arrival": lambda subject, args, progress: prompt_arrival.measure(subject, args.repeats, progress),
    "prefix": lambda subject, args, progress: prefix_reuse.measure(subject, args.repeats, progress),
    "ngram": lambda subject, args, progress: speculation.measure(
        subject, args.speculative_tokens, args.repeats, progress
    ),
    "json": lambda subject, args, progress: structured.measure(subject, args.json_requests, args.repeats, progress),
}

# Number of tokens of a section's longest sequence.
LONGEST: dict[str, Callable[[Subject, argparse.Namespace], int]] = {
    "batch": lambda subject, args: args.prompt_tokens + args.new_tokens,
    "policies": lambda subject, args: longest_sequence(policies.mixed_trace(subject, args.requests, args.rate)),
    "arrival": lambda subject, args: prompt_arrival.PROMPT_TOKENS + prompt_arrival.NEW_TOKENS,
    "prefix": lambda subject, args: prefix_reuse.PREFIX_TOKENS + prefix_reuse.TAIL_TOKENS + 1,
    "ngram": lambda subject, args: longest_sequence(itertools.chain(*speculation.make_jobs(subject).values())),
    "json": lambda subject, args: longest_sequence(structured.answer_jobs(subject, args.json_requests)),
}
