"""``fastinfer distill``: train a smaller model on what a teacher says."""

import argparse
from pathlib import Path

from fastinfer.benchmarks.report import print_plot, write_json
from fastinfer.cli.checks import distillation_settings
from fastinfer.cli.late_bar import late_bar
from fastinfer.distill.report import plot
from fastinfer.distill.run import distill


def run(args: argparse.Namespace) -> int:
    """Distill the student, and print and write the report."""
    settings, out = distillation_settings(args), Path(args.out)
    limit = round(60 * settings.minutes)
    with late_bar(total=limit, bar_format="distill {percentage:3.0f}% |{bar}| {desc}") as bar:

        def on_progress(seconds: float, text: str) -> None:
            bar().set_description_str(f"{seconds / 60:.1f} of {settings.minutes:g} min, {text}")
            bar().update(min(round(seconds), limit) - bar().n)

        report = distill(settings, out, on_progress=on_progress)
    values = report.as_json()
    write_json(out / "report.json", values)
    print(report)
    print_plot(lambda: plot(values, out / "report.png"))
    print(out / "model")
    return 0
