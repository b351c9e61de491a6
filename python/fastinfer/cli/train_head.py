"""``fastinfer train-head``: train a draft head for a model."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from fastinfer.cli.late_bar import late_bar
from fastinfer.train_head.recorder import MAX_PROMPT
from fastinfer.train_head.run import train_head
from fastinfer.utils.table import format_table


def run(args: argparse.Namespace) -> int:
    """Train the head, and print and write what was done."""
    with late_bar(total=100, unit="%", bar_format="{l_bar}{bar}| {elapsed}", disable=None) as bar:

        def progress(text: str, share: float) -> None:
            bar().set_description(text, refresh=False)
            bar().update(round(100 * min(share, 1.0)) - bar().n)

        report = train_head(args.model, args.data, args.minutes, Path(args.out), progress)
    (Path(args.out) / "training_report.json").write_text(json.dumps(asdict(report), indent=2) + "\n")
    rows = [["draft accepted, of those after accepted ones", "before", "after"]]
    for index, (before, after) in enumerate(zip(report.before, report.after, strict=True), start=1):
        rows.append([str(index), f"{before:.1%}", f"{after:.1%}"])
    print(format_table(rows))
    print(
        f"{report.num_answers} answers, {report.num_tokens} tokens, {report.passes:.1f} passes; "
        f"{report.coverage:.1%} of the model's tokens can be drafted"
    )
    if report.num_too_long:
        print(f"messages left out, as their prompts have more than {MAX_PROMPT} tokens: {report.num_too_long}")
    print(args.out)
    return 0
