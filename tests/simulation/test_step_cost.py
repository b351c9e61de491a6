"""The formula of a step's time, and its fit."""

import random

import pytest

from fastinfer.engine.stats import StepWork
from fastinfer.errors import RequestError
from fastinfer.simulation.fit import fit
from fastinfer.simulation.step_cost import StepCost

PLANTED = StepCost(
    step=3e-3, decode_sequence=1.1e-3, prompt_sequence=5e-3, prompt_token=1e-3, decode_context=3e-6, prompt_context=8e-7
)


def random_work(rng: random.Random) -> StepWork:
    decodes, prompts = rng.randrange(20), [rng.randrange(2, 300) for _ in range(rng.randrange(3))]
    context = sum(rng.randrange(1, 2000) for _ in range(decodes))
    pairs = sum(length * rng.randrange(length, 1000) for length in prompts)
    return StepWork(decodes + len(prompts), decodes + sum(prompts), sum(prompts), decodes, context, pairs)


def works(count: int, seed: int = 0) -> list[StepWork]:
    rng = random.Random(seed)
    return [random_work(rng) for _ in range(count)]


def test_seconds_is_the_sum_of_its_terms() -> None:
    work = StepWork(5, 12, num_prompt_tokens=9, num_decodes=3, decode_context=700, prompt_context=55)
    expected = 3e-3 + 3 * 1.1e-3 + 2 * 5e-3 + 9 * 1e-3 + 700 * 3e-6 + 55 * 8e-7
    assert PLANTED.seconds(work) == pytest.approx(expected, rel=1e-12)


def test_a_fit_recovers_planted_coefficients() -> None:
    fitted = fit((work, PLANTED.seconds(work)) for work in works(200))
    assert fitted.num_steps == 200
    assert fitted.median_error < 1e-9
    for name in StepCost.__dataclass_fields__:
        assert getattr(fitted.cost, name) == pytest.approx(getattr(PLANTED, name), rel=1e-6)


def test_a_fit_bears_noise_and_rare_pauses() -> None:
    """In one step of fifty another program has the processor for most of the time."""
    rng = random.Random(1)
    samples = []
    for number, work in enumerate(works(1000)):
        pause = 10 if number % 50 == 0 else 1
        samples.append((work, PLANTED.seconds(work) * rng.uniform(0.97, 1.03) * pause))
    fitted = fit(samples)
    assert fitted.num_steps == 980
    for work in works(50, seed=2):
        assert fitted.cost.seconds(work) == pytest.approx(PLANTED.seconds(work), rel=0.03)


def test_noise_does_not_shorten_the_fitted_time() -> None:
    """A step that took longer than usual weighs as much as one that took less."""
    rng = random.Random(3)
    fitted = fit((work, PLANTED.seconds(work) * rng.uniform(0.6, 1.4)) for work in works(4000))
    wanted = [PLANTED.seconds(work) for work in works(50, seed=2)]
    assert sum(map(fitted.cost.seconds, works(50, seed=2))) == pytest.approx(sum(wanted), rel=0.01)


def test_no_coefficient_is_negative() -> None:
    """Here decoding sequences make steps shorter, which least squares alone would believe."""
    samples = [(work, 0.1 + 1e-3 * work.num_tokens - 1.1e-3 * work.num_decodes) for work in works(200)]
    cost = fit(samples).cost
    assert cost.decode_sequence == 0
    assert cost.prompt_token == pytest.approx(1e-3, rel=0.05)
    assert min(getattr(cost, name) for name in StepCost.__dataclass_fields__) == 0


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([(work, 1.0) for work in works(5)], "at least 6 steps, got 5"),
        ([(work, 0.0) for work in works(9)], "got one of 0 s"),
        (
            [(StepWork(1, n, n, 0, 0, n * n), 1e-3 * n) for n in range(2, 9)],
            "depends on decode_sequence, decode_context",
        ),
        ([(StepWork(2 * n, 3 * n, 0, n, n, n), 1e-3 * n) for n in range(2, 9)], "6 coefficients, got 2 independent"),
    ],
)
def test_too_few_kinds_of_steps_are_refused(samples: list[tuple[StepWork, float]], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        fit(samples)
