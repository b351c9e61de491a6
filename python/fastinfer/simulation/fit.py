"""Fit of the time of a step to measured steps."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np

from fastinfer.errors import RequestError
from fastinfer.simulation.step_cost import StepCost, Work


@dataclass(frozen=True, slots=True)
class Fit:
    """Coefficients that were fitted to measured steps, and how well they describe them.

    Attributes:
        cost: the coefficients.
        num_steps: number of measured steps.
        median_error: median over all kinds of steps of the relative error, without its sign.
    """

    cost: StepCost
    num_steps: int
    median_error: float


def fit(samples: Iterable[tuple[Work, float]]) -> Fit:
    """Fit the coefficients by least squares.

    An error is divided by the square root of the step's time, so that short and long steps weigh as much as they take.
    Of steps with the same work the median counts, as many times as there are such steps, so that a moment in which
    another program had the processor changes little. No coefficient is negative: those that would be are 0.

    Args:
        samples: pairs of a step's work and its time in seconds, from steps of various kinds.

    Raises:
        RequestError: the steps are too few, or too much alike, to tell the coefficients apart.
    """
    times: dict[tuple[int, ...], list[float]] = defaultdict(list)
    for work, seconds in samples:
        num_prompts, num_prompt_tokens = work.num_seqs - work.num_decodes, work.num_tokens - work.num_decodes
        row = (1, work.num_decodes, num_prompts, num_prompt_tokens, work.decode_context, work.prompt_context)
        times[row].append(seconds)
    names = [field.name for field in fields(StepCost)]  # in the order of the row
    if len(times) < len(names):
        raise RequestError(f"a fit needs at least {len(names)} kinds of steps, got {len(times)}")
    work_rows = np.array(list(times), dtype=np.float64)
    medians = np.array([np.median(seconds) for seconds in times.values()])
    counts = np.array([len(seconds) for seconds in times.values()])
    if not (medians > 0).all():
        raise RequestError("a fit needs steps that take time, got one of 0 s")
    weights = np.sqrt(counts / medians)
    coefficients = _non_negative(work_rows * weights[:, None], medians * weights, names)
    errors = np.abs(work_rows @ coefficients / medians - 1)
    return Fit(StepCost(*map(float, coefficients)), int(counts.sum()), float(np.median(np.repeat(errors, counts))))


def _non_negative(rows: np.ndarray, wanted: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """Solve a least squares problem; as long as a coefficient is negative, the most negative one becomes 0.

    Columns are scaled by their largest element, so that "most negative" compares what they contribute.
    """
    scale = np.abs(rows).max(axis=0)
    empty = [name for name, largest in zip(names, scale, strict=True) if largest == 0]
    if empty:
        raise RequestError(f"a fit needs steps of all kinds, got none whose time depends on {', '.join(empty)}")
    kept = list(range(len(names)))
    while True:
        solution, _, rank, _ = np.linalg.lstsq(rows[:, kept] / scale[kept], wanted, rcond=1e-9)
        if rank < len(kept):
            raise RequestError(
                f"a fit needs steps of more kinds: {len(kept)} coefficients, got {rank} independent ones"
            )
        if solution.min() >= 0:
            break
        del kept[int(solution.argmin())]
    coefficients = np.zeros(len(names))
    coefficients[kept] = solution / scale[kept]
    return coefficients
