"""Report of a run: figures of the student while it was trained, its speed, a table and a plot."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from math import exp, nan
from pathlib import Path
from statistics import median
from typing import Any

from fastinfer.distill.settings import Settings
from fastinfer.distill.trainer import Point
from fastinfer.evaluation.comparison import SPEED_REPEATS, SPEED_TOKENS, decode_speed
from fastinfer.llm import LLM
from fastinfer.utils.table import format_table

DRAFTED = 3


@dataclass(eq=False)
class Report:
    """Results of a run.

    Attributes:
        settings: what was done.
        teacher_loss: the teacher's loss on the unseen text, in nats per token.
        kept: the teacher's layers that the student has; ``None`` for another model.
        points: the student on the unseen text, from the start of its training to the end.
        num_recorded, num_read: tokens of the records that the teacher made, and of those that were read from files.
        speeds: generated tokens/s by what was measured.
    """

    settings: Settings
    teacher_loss: float
    kept: list[int] | None
    points: Sequence[Point]
    num_recorded: int
    num_read: int
    speeds: dict[str, float] = field(default_factory=dict)

    def gap_closed(self, point: Point) -> float | None:
        """Return the closed share of the gap in loss to the teacher that the point's stage began with.

        ``None`` if there was none: a student with all layers, or one that is not the teacher's, may begin without.
        """
        first = next(stage[0] for stage in self._stages() if point in stage)
        gap = first.judgement.loss - self.teacher_loss
        return (first.judgement.loss - point.judgement.loss) / gap if gap > 0 else None

    def __str__(self) -> str:
        rows = [["", "layers", "tokens", "loss", "perplexity", "gap closed", "KL", "accepted as a draft"]]
        rows.append(["teacher", "", "", f"{self.teacher_loss:.3f}", f"{exp(self.teacher_loss):.2f}", "", "", ""])
        for stage in self._stages():
            rows.append(["student, before", *self._row(stage[0])])
            rows.append(["student, trained", *self._row(stage[-1])])
        speeds = [["generated tokens/s", ""], *([name, f"{speed:.1f}"] for name, speed in self.speeds.items())]
        return f"{format_table(rows)}\n\n{format_table(speeds)}"

    def _stages(self) -> list[list[Point]]:
        """Return the points of each stage."""
        return [list(points) for _, points in groupby(self.points, key=lambda point: point.num_layers)]

    def _row(self, point: Point) -> list[str]:
        judged = point.judgement
        numbers = [str(point.num_layers), str(point.num_tokens), f"{judged.loss:.3f}", f"{exp(judged.loss):.2f}"]
        closed = self.gap_closed(point)
        share = "none to close" if closed is None else f"{closed:.1%}"
        return [*numbers, share, f"{judged.divergence:.3f}", f"{judged.acceptance:.1%}"]

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {
            "settings": asdict(self.settings),
            "teacher_loss": self.teacher_loss,
            "kept_layers": self.kept,
            "points": [asdict(point) | {"gap_closed": self.gap_closed(point)} for point in self.points],
            "tokens_recorded": self.num_recorded,
            "tokens_read": self.num_read,
            "tokens_per_s": self.speeds,
        }


def measure_speeds(teacher: str, student: Path, texts: list[list[int]]) -> dict[str, float]:
    """Measure the speed of decoding one sequence greedily: teacher, student, and teacher with the student's drafts.

    Their runs take turns; each result is a median.

    Args:
        teacher: name or path of the teacher.
        student: folder of the student.
        texts: token ids of texts, whose first halves are the prompts.
    """
    options: dict[str, Any] = {
        "max_model_len": len(texts[0]) // 2 + SPEED_TOKENS,
        "max_num_seqs": 1,
        "enable_prefix_caching": False,
    }
    models = {
        "teacher": LLM(teacher, **options),
        "student": LLM(str(student), **options),
        "teacher, student as draft": LLM(teacher, draft_model=str(student), num_speculative_tokens=DRAFTED, **options),
    }
    prompts = [text[: len(text) // 2] for text in texts[: SPEED_REPEATS + 1]]
    speeds: dict[str, list[float]] = {name: [] for name in models}
    for prompt in prompts:
        for name, llm in models.items():
            speeds[name].append(decode_speed(llm, prompt))
    return {name: median(values[1:] or values) for name, values in speeds.items()}  # the first run is the warm-up


def plot(report: dict[str, Any], path: Path) -> Path:
    """Plot a report, as :meth:`Report.as_json` returns it, into a PNG file and return its path. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6.5), layout="constrained")
    (gap, perplexity), (accepted, speed) = figure.subplots(2, 2)
    points = report["points"]
    minutes = [point["seconds"] / 60 for point in points]
    closed = [point["gap_closed"] for point in points]
    gap.plot(minutes, [nan if share is None else 100 * share for share in closed], "o-")
    gap.set_ylabel("loss gap closed, %")
    perplexity.plot(minutes, [exp(point["judgement"]["loss"]) for point in points], "o-", label="student")
    perplexity.axhline(exp(report["teacher_loss"]), color="0.5", linestyle="--", label="teacher")
    perplexity.set_ylabel("perplexity")
    perplexity.set_ylim(bottom=0)
    perplexity.legend(frameon=False)
    accepted.plot(minutes, [100 * point["judgement"]["acceptance"] for point in points], "o-")
    accepted.set_ylabel("accepted as a draft, %")
    for axes in (gap, perplexity, accepted):
        axes.set_xlabel("minutes since the start")
        axes.grid(alpha=0.3)
    names = list(report["tokens_per_s"])
    speed.barh(names, [report["tokens_per_s"][name] for name in names])
    speed.invert_yaxis()
    speed.set_xlabel("generated tokens/s, one sequence")
    figure.savefig(path, dpi=120)
    return path
