"""``fastinfer distill``: train a smaller model on what a teacher says."""

import argparse
from pathlib import Path

from tqdm import tqdm

from fastinfer.benchmarks.report import print_plot, write_json
from fastinfer.cli.checks import distillation_settings
from fastinfer.distill.report import plot
from fastinfer.distill.run import distill


def run(args: argparse.Namespace) -> int:
    """Distill the student, and print and write the report."""
    settings, out = distillation_settings(args), Path(args.out)
    limit = round(60 * settings.minutes)
    with tqdm(total=limit, desc="distill", unit="s", bar_format="{desc} {percentage:3.0f}% |{bar}| {postfix}") as bar:

        def on_step(seconds: float, loss: float) -> None:
            bar.set_postfix_str(f"{seconds / 60:.1f} of {settings.minutes:g} min, loss {loss:.3f}")
            bar.update(min(round(seconds), limit) - bar.n)

        report = distill(settings, out, on_step=on_step)
    values = report.as_json()
    write_json(out / "report.json", values)
    print(report)
    print_plot(lambda: plot(values, out / "report.png"))
    print(out / "model")
    return 0
