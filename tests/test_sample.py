"""Sampling: greedy exactly, the rest by chi-square against the reference's distribution (seeds are fixed)."""

from typing import Any

import pytest
import reference
import torch
from helpers import assert_bitwise, device_fixture, per_thread_count
from torch import Tensor

from fastinfer import ops

device = device_fixture("cpu")


def sample(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seeds: int | Tensor = 0,
    positions: int | Tensor = 0,
) -> tuple[Tensor, Tensor]:
    """Call the operator with the same parameters in every row, unless seeds or positions are tensors."""

    def column(value: float | Tensor, dtype: torch.dtype) -> Tensor:
        if isinstance(value, Tensor):
            return value
        return torch.full((logits.shape[0],), value, dtype=dtype, device=logits.device)

    return ops.sample(
        logits,
        column(temperature, torch.float32),
        column(top_k, torch.int32),
        column(top_p, torch.float32),
        column(min_p, torch.float32),
        column(seeds, torch.int64),
        column(positions, torch.int64),
    )


def draw(row: Tensor, count: int, vary: str = "positions", **parameters: Any) -> Tensor:
    """``count`` tokens of one row of logits, at consecutive positions or seeds."""
    return sample(row.repeat(count, 1), **parameters, **{vary: torch.arange(count)})[0]


def assert_distribution(tokens: Tensor, probabilities: Tensor) -> None:
    """Pearson's chi-square test at p > 1e-4, rare tokens pooled; tokens of probability 0 never come."""
    counts = tokens.bincount(minlength=len(probabilities)).double()
    assert counts[probabilities == 0].sum() == 0
    expected = probabilities * len(tokens)
    rare = expected < 8
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    assert counts[expected == 0].sum() == 0
    counts, expected = counts[expected > 0], expected[expected > 0]
    if len(expected) == 1:
        return
    statistic = ((counts - expected).square() / expected).sum()
    degrees = torch.tensor((len(expected) - 1) / 2).double()
    p_value = torch.special.gammaincc(degrees, statistic / 2)
    assert p_value > 1e-4, f"chi-square {statistic:.1f} with {2 * degrees:.0f} degrees of freedom: p = {p_value:.2g}"


@pytest.mark.parametrize("vocab", [1, 7, 1000, 49152])
@pytest.mark.parametrize("rows", [0, 1, 2, 19])
def test_greedy_and_logprobs(rows: int, vocab: int, device: str) -> None:
    logits = 3 * torch.randn(rows, vocab, device=device)
    tokens, logprobs = sample(logits, temperature=0, top_k=5, top_p=0.1, min_p=0.9, seeds=7, positions=3)
    assert_bitwise(tokens, logits.argmax(-1))
    expected = logits.double().log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("vocab", [2, 7, 1000])
def test_greedy_takes_the_first_of_equals(vocab: int, device: str) -> None:
    for first in {0, 1, vocab // 2, vocab - 1}:
        logits = torch.full((1, vocab), -1.0, device=device)
        logits[0, first:] = 2.0
        assert sample(logits, temperature=0)[0].tolist() == [first]
        assert sample(logits, top_k=1, seeds=5)[0].tolist() == [first]


@pytest.mark.parametrize(
    "parameters",
    [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-38}, {"temperature": 1e-41}],
    ids=str,
)
def test_narrow_parameters_are_greedy(parameters: dict[str, Any], device: str) -> None:
    logits = torch.randn(50, 1000, device=device)
    tokens, logprobs = sample(logits, **parameters, positions=torch.arange(50))
    assert_bitwise(tokens, logits.argmax(-1))
    expected = logits.double().log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-6, atol=2e-6)


DEFAULTS: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"temperature": 1e6},
    {"top_k": 3},
    {"top_k": 1000},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"min_p": 0.1},
    {"temperature": 0.7, "top_k": 8},
    {"temperature": 1.5, "top_p": 0.8},
    {"temperature": 1.5, "min_p": 0.2},
    {"top_k": 6, "top_p": 0.7},
    {"top_k": 10, "min_p": 0.3},
    {"temperature": 0.8, "top_k": 12, "top_p": 0.9, "min_p": 0.05},
]


@pytest.mark.parametrize("vary", ["positions", "seeds"])
@pytest.mark.parametrize("parameters", FILTERS, ids=str)
def test_distribution(parameters: dict[str, Any], vary: str, device: str) -> None:
    row = 1.5 * torch.randn(23, device=device)
    row[[4, 11]] = -torch.inf
    tokens = draw(row, 6000, vary, **parameters)
    assert_distribution(tokens, reference.sample_probabilities(row, **DEFAULTS | parameters))


@pytest.mark.parametrize("parameters", [{}, {"top_k": 50}, {"top_p": 0.9}, {"top_k": 900, "top_p": 0.5}], ids=str)
def test_distribution_over_a_large_vocabulary(parameters: dict[str, Any], device: str) -> None:
    """Sums over many small probabilities must not drift: sixteen runs of neighbouring ids come as they should."""
    row = 2 * torch.randn(49152, device=device)
    tokens = draw(row, 300, **parameters)
    probabilities = reference.sample_probabilities(row, **DEFAULTS | parameters)
    assert probabilities[tokens].min() > 0
    assert_distribution(tokens // 3072, probabilities.view(16, 3072).sum(1))


def test_ties_at_the_cut_keep_the_smaller_ids(device: str) -> None:
    row = torch.zeros(100, device=device)
    assert set(draw(row, 200, top_k=3).tolist()) == {0, 1, 2}
    row[50] = 1.0
    assert set(draw(row, 200, top_k=3).tolist()) == {0, 1, 50}
    assert set(draw(torch.zeros(10), 200, top_p=0.25).tolist()) == {0, 1, 2}
    assert set(draw(torch.tensor([1.0, 0.0, 1.0]), 200, min_p=1.0).tolist()) == {0, 2}


def test_only_finite_logits_are_drawn(device: str) -> None:
    row = torch.full((1000,), -torch.inf, device=device)
    row[[3, 700]] = torch.tensor([-50.0, -50.0])
    assert set(draw(row, 100, top_k=20).tolist()) == {3, 700}
    row[3] = -torch.inf
    tokens, logprobs = sample(row[None], temperature=0.5)
    assert tokens.tolist() == [700]
    assert logprobs.tolist() == [0.0]


def test_extreme_logits_do_not_overflow(device: str) -> None:
    row = torch.tensor([3e38, -3e38, 2.9e38, 0.0], device=device)
    assert set(draw(row, 50).tolist()) == {0}
    assert sample(row[None] * 1e-36, temperature=0.01)[1].isfinite().all()


@pytest.mark.parametrize("top_p", [1.0, 0.95])
@pytest.mark.parametrize("temperature", [1e-45, 1e-40, 1e-30, 1e-10])
def test_vanishing_temperature_is_greedy(temperature: float, top_p: float, device: str) -> None:
    """Its reciprocal is infinite, or nearly."""
    logits = torch.tensor([[0.0, 5.0, 1.0, 2.0]], device=device)
    assert sample(logits, temperature=temperature, top_p=top_p)[0].tolist() == [1]


@pytest.mark.parametrize("vocab", [7, 1000])
def test_a_row_depends_on_its_seed_and_position_alone(vocab: int, device: str) -> None:
    rows = 40
    logits = torch.randn(rows, vocab, device=device)
    parameters = [
        torch.tensor([0.0, 0.7, 1.0, 1.5], device=device).repeat(rows // 4),
        torch.tensor([0, 5, 0, 3, 1], dtype=torch.int32, device=device).repeat(rows // 5),
        torch.tensor([1.0, 0.8], device=device).repeat(rows // 2),
        torch.tensor([0.0, 0.0, 0.1, 0.0, 0.3], device=device).repeat(rows // 5),
        torch.randint(-(2**63), 2**63 - 1, (rows,), device=device),
        torch.randint(0, 2**40, (rows,), device=device),
    ]
    tokens, logprobs = ops.sample(logits, *parameters)
    for row in range(rows):
        one = slice(row, row + 1)
        alone = ops.sample(logits[one], *(p[one] for p in parameters))
        assert_bitwise(alone[0], tokens[one])
        assert_bitwise(alone[1], logprobs[one])
    assert_bitwise(*per_thread_count(lambda: torch.stack([t.double() for t in ops.sample(logits, *parameters)])))


def test_random_numbers_of_different_keys_are_independent(device: str) -> None:
    """Two streams over 16 equal tokens agree in 1 of 16 draws; the seed's upper half, sign and position all count."""
    row, count = torch.zeros(16, device=device), 4000
    streams = [draw(row, count, seeds=seed) for seed in (0, 1, -1, 2**32, 2**62)]
    streams.append(sample(row.repeat(count, 1), positions=torch.arange(count) + 2**32)[0])
    for index, stream in enumerate(streams):
        for other in [*streams[index + 1 :], stream.roll(1)]:
            agreement = (stream == other).double().mean()
            assert abs(agreement - 1 / 16) < 4.5 * (1 / 16 * 15 / 16 / count) ** 0.5
    assert_bitwise(draw(row, count), streams[0])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("place", [0, 8, 36])
def test_nan_raises(place: int, temperature: float, device: str) -> None:
    logits = torch.randn(3, 37, device=device)
    logits[1, place] = torch.nan
    with pytest.raises(RuntimeError, match=r"\blogits\b.*\b1\b"):
        sample(logits, temperature)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_finite_values_raises(temperature: float, device: str) -> None:
    logits = torch.randn(3, 37, device=device)
    logits[2] = -torch.inf
    with pytest.raises(RuntimeError, match=r"\blogits\b.*\b2\b"):
        sample(logits, temperature)


GOOD: dict[str, Tensor] = {
    "logits": torch.zeros(3, 8),
    "temperature": torch.ones(3),
    "top_k": torch.zeros(3, dtype=torch.int32),
    "top_p": torch.ones(3),
    "min_p": torch.zeros(3),
    "seeds": torch.zeros(3, dtype=torch.int64),
    "positions": torch.zeros(3, dtype=torch.int64),
}


@pytest.mark.parametrize("argument", [name for name in GOOD if name != "logits"])
@pytest.mark.parametrize("fault", ["dtype", "length", "2-d"])
def test_parameter_errors_name_the_argument(argument: str, fault: str) -> None:
    good = GOOD[argument]
    bad = {"dtype": good.to(torch.int16), "length": good[:2], "2-d": good[:, None]}[fault]
    with pytest.raises((RuntimeError, ValueError), match=rf"\b{argument}\b"):
        ops.sample(**(GOOD | {argument: bad}))


@pytest.mark.parametrize(
    "logits",
    [torch.zeros(3, 8).half(), torch.zeros(8), torch.zeros(3, 16)[:, :8], torch.zeros(3, 0)],
    ids=["dtype", "1-d", "strided", "no vocabulary"],
)
def test_logits_errors_name_the_argument(logits: Tensor) -> None:
    with pytest.raises((RuntimeError, ValueError), match=r"\blogits\b"):
        ops.sample(**(GOOD | {"logits": logits}))
