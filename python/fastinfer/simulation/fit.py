"""Fit of the time of a step to measured steps."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np

from fastinfer.errors import RequestError
from fastinfer.simulation.step_cost import StepCost, Work

# A step that takes more than this multiple of the fitted time waited for something else, such as another program.
OUTLIER = 2.0
MAX_ROUNDS = 10


@dataclass(frozen=True, slots=True)
class Fit:
    """Coefficients that were fitted to measured steps, and how well they describe them.

    Attributes:
        cost: the coefficients.
        num_steps: number of steps that they were fitted to.
        median_error: median of these steps' relative errors, without their signs.
    """

    cost: StepCost
    num_steps: int
    median_error: float


def fit(samples: Iterable[tuple[Work, float]]) -> Fit:
    """Fit the coefficients by least squares.

    An error is divided by the square root of the fitted time, so that short and long steps weigh as much as they take.
    The measured time in its place would give less weight to steps that took longer than usual, and fit too short times.
    Steps that take more than ``OUTLIER`` times the fitted time are left out. No coefficient is negative: those that
    would be are 0.

    Args:
        samples: pairs of a step's work and its time in seconds, from steps of various kinds.

    Raises:
        RequestError: the steps are too few, or too much alike, to tell the coefficients apart.
    """
    pairs = list(samples)
    names = [field.name for field in fields(StepCost)]
    rows = np.array([_row(work) for work, _ in pairs], dtype=np.float64).reshape(len(pairs), len(names))
    seconds = np.array([time for _, time in pairs])
    if not (seconds > 0).all():
        raise RequestError("a fit needs steps that take time, got one of 0 s")
    is_kept, expected = np.ones(len(pairs), dtype=bool), seconds
    for _ in range(MAX_ROUNDS):
        if is_kept.sum() < len(names):
            raise RequestError(f"a fit needs at least {len(names)} steps, got {is_kept.sum()}")
        weights = 1 / np.sqrt(expected[is_kept])
        coefficients = _non_negative(rows[is_kept] * weights[:, None], seconds[is_kept] * weights, names)
        fitted = rows @ coefficients
        was_kept, is_kept = is_kept, seconds <= OUTLIER * fitted
        if (was_kept == is_kept).all() and np.allclose(fitted, expected, rtol=1e-3):
            break
        expected = fitted
    errors = np.abs(fitted / seconds - 1)[was_kept]
    return Fit(StepCost(*map(float, coefficients)), int(was_kept.sum()), float(np.median(errors)))


def _row(work: Work) -> tuple[int, ...]:
    """Return by what each coefficient is multiplied, in the order of the fields of :class:`StepCost`."""
    num_prompts, num_prompt_tokens = work.num_seqs - work.num_decodes, work.num_tokens - work.num_decodes
    return 1, work.num_decodes, num_prompts, num_prompt_tokens, work.decode_context, work.prompt_context


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
