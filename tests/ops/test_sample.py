"""Sampling: greedy and every single draw against the winner of the reference's race, the whole by chi-square, and how
often two distributions agree (seeds are fixed)."""

from typing import Any

import pytest
import torch
from support import reference
from support.helpers import assert_bitwise, device_fixture, per_thread_count
from torch import Tensor

from fastinfer import ops
from fastinfer.ops import sampling

device = device_fixture("cpu", "cuda", "emulated")


def emulated() -> bool:
    """Whether the device fixture's current device is the emulator, which needs 1 to 100 ms a row."""
    return sampling.ops is not torch.ops.fastinfer


def on_host(device: str) -> bool:
    return device == "cpu" and not emulated()


def sample(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seeds: int | Tensor = 0,
    positions: int | Tensor = 0,
    **options: Any,
) -> ops.Sampled:
    """Call the operator with the same parameters in every row, unless seeds or positions are tensors."""

    def column(value: float | Tensor, dtype: torch.dtype) -> Tensor:
        if isinstance(value, Tensor):
            return value.to(logits.device)
        return torch.full((logits.shape[0],), value, dtype=dtype, device=logits.device)

    return ops.sample(
        logits,
        column(temperature, torch.float32),
        column(top_k, torch.int32),
        column(top_p, torch.float32),
        column(min_p, torch.float32),
        column(seeds, torch.int64),
        column(positions, torch.int64),
        **options,
    )


def draw(row: Tensor, count: int, vary: str = "positions", **parameters: Any) -> Tensor:
    """``count`` tokens of one row of logits, at consecutive positions or seeds."""
    return sample(row.repeat(count, 1), **parameters, **{vary: torch.arange(count)}).tokens.cpu()


def assert_logprobs(logprobs: Tensor, logits: Tensor, tokens: Tensor) -> None:
    """Those of the tokens, under the unmodified logits; fp32 sums."""
    expected = logits.double().log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-6, atol=4e-6)


def assert_wins(token: int, logits: Tensor, seed: int, position: int, **filters: Any) -> None:
    """``token`` is the one whose noise over its probability is least, give or take the rounding of sums at top_p."""
    noise, top_p = reference.sample_noise(seed, position, len(logits)), filters["top_p"]
    limits = [top_p] if top_p == 1 else [top_p - 2e-6, top_p, top_p + 2e-6]
    times = [noise / reference.sample_probabilities(logits, **filters | {"top_p": limit}) for limit in limits]
    assert token in [int(t.argmin()) for t in times]


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


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 1000, 49152])
@pytest.mark.parametrize("rows", [0, 1, 2, 19])
def test_greedy_and_logprobs(rows: int, vocab: int, device: str) -> None:
    if emulated() and vocab > 1000:
        rows = min(rows, 1)
    logits = 3 * torch.randn(rows, vocab, device=device)
    greedy = {"temperature": 0, "top_k": 5, "top_p": 0.1, "min_p": 0.9, "seeds": 7, "positions": 3}
    tokens, logprobs, *top = sample(logits, **greedy)
    assert_bitwise(tokens, logits.argmax(-1))
    assert_logprobs(logprobs, logits, tokens)
    assert [t.shape for t in top] == [(rows, 0), (rows, 0)]


@pytest.mark.parametrize("vocab", [2, 7, 1000])
def test_greedy_takes_the_first_of_equals(vocab: int, device: str) -> None:
    for first in {0, 1, vocab // 2, vocab - 1}:
        logits = torch.full((1, vocab), -1.0, device=device)
        logits[0, first:] = 2.0
        assert sample(logits, temperature=0).tokens.tolist() == [first]
        assert sample(logits, top_k=1, seeds=5).tokens.tolist() == [first]


@pytest.mark.parametrize(
    "parameters",
    [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-38}, {"temperature": 1e-41}],
    ids=str,
)
def test_narrow_parameters_are_greedy(parameters: dict[str, Any], device: str) -> None:
    rows = 4 if emulated() else 50
    logits = torch.randn(rows, 1000, device=device)
    tokens, logprobs, *_ = sample(logits, **parameters, positions=torch.arange(rows))
    assert_bitwise(tokens, logits.argmax(-1))
    assert_logprobs(logprobs, logits, tokens)


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
    {"top_p": 0.6, "min_p": 0.2},
    {"temperature": 0.8, "top_k": 12, "top_p": 0.9, "min_p": 0.05},
]


@pytest.mark.repeats
@pytest.mark.parametrize("vary", ["positions", "seeds"])
@pytest.mark.parametrize("parameters", FILTERS, ids=str)
def test_distribution(parameters: dict[str, Any], vary: str, device: str) -> None:
    row = 1.5 * torch.randn(23, device=device)
    row[[4, 11]] = -torch.inf
    tokens = draw(row, 150 if emulated() else 6000, vary, **parameters)
    assert_distribution(tokens, reference.sample_probabilities(row.cpu(), **DEFAULTS | parameters))


@pytest.mark.parametrize("parameters", [{}, {"top_k": 50}, {"top_p": 0.9}, {"top_k": 900, "top_p": 0.5}], ids=str)
def test_distribution_over_a_large_vocabulary(parameters: dict[str, Any], device: str) -> None:
    """Sums over many small probabilities must not drift: sixteen runs of neighbouring ids come as they should."""
    if emulated():
        pytest.skip("hundreds of large rows; test_every_draw has one")
    row = 2 * torch.randn(49152, device=device)
    tokens = draw(row, 300, **parameters)
    probabilities = reference.sample_probabilities(row.cpu(), **DEFAULTS | parameters)
    assert probabilities[tokens].min() > 0
    assert_distribution(tokens // 3072, probabilities.view(16, 3072).sum(1))


@pytest.mark.parametrize("spread", [0.01, 1.0, 4.0])
@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 127, 1000, 50001])
def test_every_draw_is_the_winner_of_the_race(vocab: int, spread: float, device: str) -> None:
    """Finds a kept set that is off by one token in many: it moves all the others."""
    rows = len(FILTERS) if vocab < 50000 or not emulated() else 1
    logits = spread * torch.randn(rows, vocab, device=device)
    logits[:, vocab // 2 :: 7] = logits[:, :1].clone()  # equals
    filters = [DEFAULTS | FILTERS[-1 - row] for row in range(rows)]
    dtypes = [torch.float32, torch.int32, torch.float32, torch.float32]
    parameters = {n: torch.tensor([f[n] for f in filters], dtype=t) for n, t in zip(DEFAULTS, dtypes, strict=True)}
    for position in (0, 7) if rows > 1 else (0,):
        tokens = sample(logits, **parameters, seeds=vocab, positions=position).tokens
        for row in range(rows):
            assert_wins(int(tokens[row]), logits[row].cpu(), vocab, position, **filters[row])


def test_a_block_whose_least_noise_wins_narrowly_takes_part(device: str) -> None:
    """The others are left out by a bound, which must not be above that noise."""
    rows, winners = torch.full((50, 128), -torch.inf, device=device), []
    for position, row in enumerate(rows):
        noise = reference.sample_noise(0, position, 128)
        winners.append(64 + int(noise[64:].argmin()))
        row[0] = 0.0
        row[winners[-1]] = (noise[winners[-1]] / noise[0]).log() + 1e-4
    assert sample(rows, positions=torch.arange(50)).tokens.tolist() == winners


@pytest.mark.parametrize("parameters", [{"top_k": 70}, {"top_k": 5}, {"top_p": 0.3001}, {"top_k": 700, "top_p": 0.9}])
def test_more_equals_than_can_be_sorted(parameters: dict[str, Any], device: str) -> None:
    """The GPU sorts 64 candidates of 1000: of equals beyond, it must find the last by counting."""
    for winners in (0, 3):
        row = torch.zeros(1000, device=device)
        row[500 : 500 + winners] = 2.0
        for position in (0, 1):
            token = sample(row[None], **parameters, positions=position).tokens.item()
            assert_wins(int(token), row.cpu(), 0, position, **DEFAULTS | parameters)


@pytest.mark.repeats
@pytest.mark.parametrize("vocab", [200, 1000])
def test_neighbours_are_equally_likely(vocab: int, device: str) -> None:
    """Places within the blocks and groups of which the noise is made."""
    count = 150 if emulated() else 20 * vocab
    assert_distribution(draw(torch.zeros(vocab, device=device), count), torch.full((vocab,), 1 / vocab).double())


def test_the_noise_is_exponential_and_independent() -> None:
    """The reference's, and so that of every draw: moments, tail, and neighbours within and across blocks."""
    noise = torch.stack([reference.sample_noise(seed, 5, 512) for seed in range(2000)])
    uniform = torch.exp(-noise)
    assert_distribution((16 * uniform).long().flatten(), torch.full((16,), 1 / 16).double())
    for distance in (1, 2, 4, 63, 64, 256):
        pairs = (16 * uniform[:, distance:]).long() % 16 * 16 + (16 * uniform[:, :-distance]).long() % 16
        assert_distribution(pairs.flatten(), torch.full((256,), 1 / 256).double())
    # Neighbours could be independent in pairs and the least of many be wrong: it is what decides.
    for width in (7, 64, 512):
        least = torch.exp(-width * noise[:, :width].amin(1))
        assert_distribution((16 * least).long(), torch.full((16,), 1 / 16).double())


def pairs_of_distributions() -> dict[str, tuple[Tensor, Tensor]]:
    """Logits of two models that differ a little or much."""
    flat, peaked = 0.3 * torch.randn(1000), 3 * torch.randn(1000)
    return {
        "equal": (peaked, peaked.clone()),
        "two flat ones": (flat, 0.3 * torch.randn(1000)),
        "two peaked ones": (peaked, peaked + 0.5 * torch.randn(1000)),
        "shifted": (peaked, peaked.roll(1)),
        "a flat and a peaked one": (flat, peaked),
        "hardly any overlap": (peaked, -peaked),
        "two tokens": (torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.0])),
        "half of the tokens": (torch.zeros(64), torch.zeros(64).index_fill_(0, torch.arange(0, 64, 2), -torch.inf)),
    }


@pytest.mark.repeats
@pytest.mark.parametrize("case", range(len(pairs_of_distributions())), ids=list(pairs_of_distributions()))
@pytest.mark.parametrize("parameters", [{}, {"temperature": 0.7, "top_k": 40, "top_p": 0.95}], ids=str)
def test_two_distributions_agree(case: int, parameters: dict[str, Any], device: str) -> None:
    """As often as a race with the same noise must, which is at least (1 - TV) / (1 + TV)."""
    rows = list(pairs_of_distributions().values())[case]
    count = 100 if emulated() else 5000
    first, second = (draw(row.to(device), count, **parameters) for row in rows)
    p, q = (reference.sample_probabilities(row, **DEFAULTS | parameters) for row in rows)
    distance = (p - q).abs().sum() / 2
    both = ((p > 0) & (q > 0)).nonzero()[:, 0]
    # Token i wins both races if it wins one with the larger of every other token's two odds against it.
    expected = sum(1 / torch.maximum(p / p[i], q / q[i]).sum() for i in both) if len(both) else torch.zeros(())
    assert expected > (1 - distance) / (1 + distance) - 1e-9
    agreement = (first == second).double().mean()
    assert abs(agreement - expected) <= 4.5 * (expected * (1 - expected) / count).clamp(min=0).sqrt() + 1e-9


@pytest.mark.parametrize("parameters", FILTERS, ids=str)
def test_padding_of_the_vocabulary_changes_nothing(parameters: dict[str, Any], device: str) -> None:
    rows = 3 if emulated() else 20
    logits = 2 * torch.randn(rows, 1000, device=device)
    tokens = sample(logits, **parameters, positions=torch.arange(rows)).tokens
    for vocab in (1001, 1024, 1300):
        padded = torch.full((rows, vocab), -torch.inf, device=device)
        padded[:, :1000] = logits
        assert_bitwise(sample(padded, **parameters, positions=torch.arange(rows)).tokens, tokens)


@pytest.mark.parametrize("parameters", FILTERS, ids=str)
def test_cpu_and_gpu_draw_the_same_tokens(parameters: dict[str, Any], device: str) -> None:
    if on_host(device):
        pytest.skip("compares another device with the CPU")
    rows = 6
    logits = torch.linspace(0.1, 4, rows)[:, None] * torch.randn(rows, 3001)
    tokens = sample(logits.to(device), **parameters, positions=torch.arange(rows)).tokens
    columns = [torch.full((rows,), (DEFAULTS | parameters)[name]) for name in DEFAULTS]
    columns[1] = columns[1].int()
    expected = torch.ops.fastinfer.sample.default(
        logits, *columns, torch.zeros(rows, dtype=torch.int64), torch.arange(rows), *[None] * 7, 0
    )
    assert_bitwise(tokens.cpu(), expected[0])


@pytest.mark.parametrize("parameters", FILTERS, ids=str)
def test_a_row_is_drawn_alike_in_any_batch(parameters: dict[str, Any], device: str) -> None:
    logits = torch.linspace(0.2, 4, 4, device=device)[:, None] * torch.randn(4, 2001, device=device)
    together = sample(logits, **parameters, positions=torch.arange(4)).tokens
    alone = [sample(logits[i : i + 1], **parameters, positions=torch.tensor([i])).tokens for i in range(4)]
    assert_bitwise(torch.cat(alone), together)


@pytest.mark.parametrize(
    "parameters",
    [{"top_k": 1500}, {"top_p": 0.97}, {"min_p": 0.001}, {"top_k": 1200, "top_p": 0.99}, {"top_p": 0.9, "min_p": 0.01}],
    ids=str,
)
def test_cuts_far_down_a_long_row(parameters: dict[str, Any], device: str) -> None:
    """A GPU lists the likeliest tokens of each part of a row, in all 256 of 3001: the cut is not among them."""
    row = 0.5 * torch.randn(3001, device=device)
    for position in (0, 1):
        token = sample(row[None], **parameters, positions=position).tokens.item()
        assert_wins(int(token), row.cpu(), 0, position, **DEFAULTS | parameters)


def test_many_unlikely_tokens_are_likely_together(device: str) -> None:
    """Top-k keeps all of them; the token drawn at this position is one."""
    row = torch.full((1 << 18,), -16.5, device=device)
    row[0] = 0.0
    token = int(sample(row[None], top_k=1 << 18, positions=8).tokens)
    assert token != 0
    assert_wins(token, row.cpu(), 0, 8, **DEFAULTS | {"top_k": 1 << 18})


@pytest.mark.parametrize(
    "parameters", [{}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.1}, {"temperature": 0.0}], ids=str
)
def test_parts_of_a_row_without_tokens(parameters: dict[str, Any], device: str) -> None:
    """Whatever part of a row has the only tokens, or one that spoils it."""
    logits = torch.full((4, 2001), -torch.inf, device=device)
    places = [0, 700, 1500, 2000]
    for row, place in enumerate(places):
        logits[row, place] = -30.0
    assert sample(logits, **parameters).tokens.tolist() == places
    mask = torch.zeros(4, 63, dtype=torch.int32, device=device)
    for row, place in enumerate(places):
        mask[row, place // 32] = 1 << place % 32
    assert sample(torch.randn(4, 2001, device=device), **parameters, mask=mask).tokens.tolist() == places
    if on_host(device):
        return
    for bad in (torch.nan, torch.inf):
        logits = torch.randn(4, 2001, device=device)
        logits[[0, 1, 2], places[1:]] = bad
        tokens = sample(logits, **parameters).tokens.tolist()
        assert tokens[:3] == [-1] * 3
        assert tokens[3] >= 0


@pytest.mark.parametrize("place", [1e-30, 1e-3, 1.0, -1e9, 1e30])
@pytest.mark.parametrize("parameters", [{"top_k": 100}, {"top_k": 900}, {"top_p": 0.5}], ids=str)
def test_the_cut_is_found_at_any_scale(parameters: dict[str, Any], place: float, device: str) -> None:
    """Numbers that only their last bits tell apart, or only their exponents, beside a maximum far away."""
    row = place * (1 + torch.arange(1000).roll(300) * 1e-6).to(device)
    row[17] = place + max(3.0, abs(place) * 1e-6)
    row[1::3] *= torch.logspace(-3, 0, 333).to(device)
    temperature = max(abs(place), 1e-20)
    token = sample(row[None], temperature, **parameters).tokens.item()
    assert_wins(int(token), row.cpu(), 0, 0, **DEFAULTS | {"temperature": temperature} | parameters)


@pytest.mark.repeats
def test_ties_at_the_cut_keep_the_smaller_ids(device: str) -> None:
    row = torch.zeros(100, device=device)
    assert set(draw(row, 100, top_k=3).tolist()) == {0, 1, 2}
    row[50] = 1.0
    assert set(draw(row, 100, top_k=3).tolist()) == {0, 1, 50}
    assert set(draw(torch.zeros(10, device=device), 100, top_p=0.25).tolist()) == {0, 1, 2}
    assert set(draw(torch.zeros(4, device=device), 100, top_p=0.5).tolist()) == {0, 1}
    assert set(draw(torch.tensor([1.0, 0.0, 1.0], device=device), 100, min_p=1.0).tolist()) == {0, 2}
    assert set(draw(torch.tensor([0.0, -0.0, 0.0], device=device), 100, top_k=2).tolist()) == {0, 1}


def test_only_finite_logits_are_drawn(device: str) -> None:
    row = torch.full((1000,), -torch.inf, device=device)
    row[[3, 700]] = torch.tensor([-50.0, -50.0], device=device)
    assert set(draw(row, 25, top_k=20).tolist()) == {3, 700}
    row[3] = -torch.inf
    tokens, logprobs, *_ = sample(row[None], temperature=0.5)
    assert tokens.tolist() == [700]
    assert logprobs.tolist() == [0.0]


def test_extreme_logits_do_not_overflow(device: str) -> None:
    row = torch.tensor([3e38, -3e38, 2.9e38, 0.0], device=device)
    assert set(draw(row, 50).tolist()) == {0}
    assert set(draw(row, 50, top_k=2, top_p=0.9).tolist()) == {0}
    assert sample(row[None] * 1e-36, temperature=0.01).logprobs.isfinite().all()
    least = torch.full((1, 40), torch.finfo(torch.float32).min, device=device)
    assert sample(least, temperature=0).tokens.tolist() == [0]
    assert set(draw(least[0], 100, top_k=2).tolist()) == {0, 1}


@pytest.mark.parametrize("top_p", [1.0, 0.95])
@pytest.mark.parametrize("temperature", [1e-45, 1e-40, 1e-30, 1e-10])
def test_vanishing_temperature_is_greedy(temperature: float, top_p: float, device: str) -> None:
    """Its reciprocal is infinite, or nearly."""
    logits = torch.tensor([[0.0, 5.0, 1.0, 2.0]], device=device)
    assert sample(logits, temperature=temperature, top_p=top_p).tokens.tolist() == [1]


BIASES = ["bias_start", "bias_tokens", "bias_values"]
PENALTIES = [[1.0, 0.0, 0.0], [1.3, 0.0, 0.0], [1.0, 0.7, 0.0], [1.0, 0.0, 0.4], [0.8, -0.5, 0.2]]


def biases(rows: int, vocab: int) -> list[Tensor]:
    """0 to 9 a row, none in the second, one of them -inf, never for token 0; a row may have a token twice."""
    counts = torch.randint(0, 10 if vocab > 1 else 1, (rows,))
    counts[1:2] = 0
    values = 4 * torch.randn(int(counts.sum()))
    values[:1] = -torch.inf
    return [
        torch.cat([torch.zeros(1), counts.cumsum(0)]).int(),
        torch.randint(1, max(vocab, 2), values.shape).int(),
        values,
    ]


def modifiers(rows: int, vocab: int, device: str) -> dict[str, Tensor]:
    """Random penalties, counts, masks and biases, with bits set past the vocabulary's end."""
    words = torch.randint(-(2**31), 2**31, (2, rows, -(-vocab // 32)), dtype=torch.int64).int()
    words[1, :, 0] |= 1  # one token at least
    counts = torch.randint(-3, 4, (rows, vocab)).clamp(min=0).int()
    values = [torch.tensor((PENALTIES * rows)[:rows]), counts, words[0], words[1]]
    values += biases(rows, vocab)
    names = ["penalties", "output_counts", "prompt_mask", "mask", "bias_start", "bias_tokens", "bias_values"]
    return {name: value.to(device) for name, value in zip(names, values, strict=True)}


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 130, 1001])
def test_penalties_biases_and_mask(vocab: int, device: str) -> None:
    rows = len(PENALTIES)
    logits = 3 * torch.randn(rows, vocab, device=device)
    options = modifiers(rows, vocab, device)
    expected = reference.sample_logits(logits, **options)
    greedy = sample(logits, temperature=0, **options)
    assert_bitwise(greedy.tokens, expected.argmax(-1))
    assert_logprobs(greedy.logprobs, logits, greedy.tokens)
    filters = {"temperature": 0.8, "top_k": 200, "top_p": 0.9, "min_p": 0.01}
    tokens = sample(logits, **filters, **options).tokens
    for row in range(rows):
        assert_wins(int(tokens[row]), expected[row].cpu(), 0, 0, **filters)


@pytest.mark.parametrize(
    "given",
    [{"penalties"}, {"penalties", "output_counts"}, {"penalties", "prompt_mask"}, {"mask"}, set(BIASES)],
    ids=lambda given: "-".join(sorted(given)),
)
def test_each_modifier_may_be_missing(given: set[str], device: str) -> None:
    logits = torch.randn(len(PENALTIES), 70, device=device)
    options = modifiers(len(PENALTIES), 70, device)
    off = {
        "penalties": torch.tensor([1.0, 0.0, 0.0], device=device).repeat(len(logits), 1),
        "output_counts": torch.zeros_like(options["output_counts"]),
        "prompt_mask": torch.zeros_like(options["prompt_mask"]),
        "mask": torch.full_like(options["mask"], -1),
        "bias_start": torch.zeros_like(options["bias_start"]),
        "bias_tokens": options["bias_tokens"][:0],
        "bias_values": options["bias_values"][:0],
    }
    expected = reference.sample_logits(logits, **{n: options[n] if n in given else off[n] for n in off})
    tokens = sample(logits, temperature=0, **{n: options[n] for n in given}).tokens
    assert_bitwise(tokens, expected.argmax(-1))


@pytest.mark.repeats
def test_a_mask_forbids(device: str) -> None:
    row = torch.zeros(100, device=device)
    row[2] = 5.0
    mask = torch.tensor([[-1 & ~4, 0, 1, 0]], dtype=torch.int32, device=device)
    tokens = draw(row, 200, mask=mask.expand(200, 4).contiguous(), top_k=40)
    assert set(tokens.tolist()) == {*range(32), 64} - {2}


def bias(*rows: dict[int, float], device: str = "cpu") -> dict[str, Tensor]:
    starts = [sum(len(row) for row in rows[:count]) for count in range(len(rows) + 1)]
    return {
        "bias_start": torch.tensor(starts, dtype=torch.int32, device=device),
        "bias_tokens": torch.tensor([t for row in rows for t in row], dtype=torch.int32, device=device),
        "bias_values": torch.tensor([v for row in rows for v in row.values()], dtype=torch.float32, device=device),
    }


def test_a_bias_moves_its_own_row_alone(device: str) -> None:
    logits = torch.zeros(4, 1000, device=device)
    logits[:, 2] = 5.0
    options = bias({}, {999: 6.0, 2: -1.0}, {2: -torch.inf, 70: 0.5}, {}, device=device)
    sampled = sample(logits, temperature=0, **options)
    assert sampled.tokens.tolist() == [2, 999, 70, 2]
    assert_logprobs(sampled.logprobs, logits, sampled.tokens)
    assert set(draw(logits[0], 40, top_k=3, **bias(*[{2: -torch.inf, 9: 1.0}] * 40, device=device)).tolist()) == {
        0,
        1,
        9,
    }


def test_a_mask_outweighs_a_bias(device: str) -> None:
    mask = torch.tensor([[-1 & ~4]], dtype=torch.int32, device=device)
    tokens = sample(torch.zeros(1, 32, device=device), 0, mask=mask, **bias({2: 100.0, 5: 1.0}, device=device)).tokens
    assert tokens.tolist() == [5]


def test_many_biases(device: str) -> None:
    """More than a block has threads."""
    logits = torch.randn(2, 3001, device=device)
    values = torch.randn(2, 3001)
    options = bias(*[dict(enumerate(row)) for row in values.tolist()], device=device)
    tokens = sample(logits, temperature=0, **options).tokens
    assert_bitwise(tokens.cpu(), (logits.cpu() + values).argmax(-1))


BAD_BIASES: dict[str, tuple[str, list[float]]] = {
    "token past the vocabulary": ("bias_tokens", [1, 1000, 3]),
    "negative token": ("bias_tokens", [1, -1, 3]),
    "+inf": ("bias_values", [0.5, torch.inf, 1.0]),
    "NaN": ("bias_values", [0.5, torch.nan, 1.0]),
    "not from 0": ("bias_start", [1, 2, 3]),
    "falling": ("bias_start", [0, 4, 3]),
    "past the end": ("bias_start", [0, 1, 100]),
    "short of the end": ("bias_start", [0, 1, 2]),
    "negative": ("bias_start", [-7, 1, 3]),
}


@pytest.mark.parametrize("case", BAD_BIASES)
def test_biases_that_make_no_sense(case: str, device: str) -> None:
    """The CPU names them. A GPU leaves out what is out of range, and reads nothing there."""
    name, values = BAD_BIASES[case]
    options = bias({1: 0.5}, {2: 0.5, 3: 1.0}, device=device)
    options[name] = torch.tensor(values, device=device).to(options[name].dtype)
    logits = torch.zeros(2, 1000, device=device)
    logits[:, 500] = 3.0
    if on_host(device):
        with pytest.raises(RuntimeError, match=rf"\b{name}\b"):
            sample(logits, **options)
    else:
        assert sample(logits, temperature=0, **options).tokens.tolist() == [500, 500]


@pytest.mark.parametrize("missing", BIASES)
def test_biases_are_given_together(missing: str) -> None:
    with pytest.raises(RuntimeError, match=r"\bbias_start\b.*together"):
        ops.sample(**GOOD | {missing: None})


@pytest.mark.parametrize("count", [1, 5, 20])
@pytest.mark.parametrize("vocab", [1, 20, 33, 1000])
def test_top_logprobs(vocab: int, count: int, device: str) -> None:
    """Under the unmodified logits, equals in the order of their ids; past the finite ones, -1 and -inf."""
    logits = torch.randn(3, vocab, device=device)
    logits[0, vocab // 2 :] = 0.5
    logits[1, 1:] = -torch.inf
    _, _, top_logprobs, top_tokens = sample(logits, 0.7, 2, num_logprobs=count, **modifiers(3, vocab, device))
    expected, ids = logits.double().log_softmax(-1).sort(descending=True, stable=True)
    shared = min(count, vocab)
    ids = ids[:, :shared].masked_fill(expected[:, :shared] == -torch.inf, -1)
    assert_bitwise(top_tokens[:, :shared], ids)
    torch.testing.assert_close(top_logprobs[:, :shared].double(), expected[:, :shared], rtol=1e-6, atol=4e-6)
    assert top_tokens[:, shared:].eq(-1).all()
    assert top_logprobs[:, shared:].eq(-torch.inf).all()


@pytest.mark.parametrize("parameters", [{"temperature": 0}, {}, {"top_k": 5, "top_p": 0.9}], ids=str)
@pytest.mark.parametrize("modified", [False, True])
def test_no_logprobs(modified: bool, parameters: dict[str, Any], device: str) -> None:
    """The tokens are those that come with log-probabilities."""
    logits = torch.randn(3, 301, device=device)
    options = modifiers(3, 301, device) if modified else {}
    tokens, *others = sample(logits, **parameters, **options, num_logprobs=None)
    assert_bitwise(tokens, sample(logits, **parameters, **options).tokens)
    assert [(t.shape, t.dtype) for t in others] == [
        ((0,), torch.float32),
        ((3, 0), torch.float32),
        ((3, 0), torch.int64),
    ]


@pytest.mark.parametrize("vocab", [1, 63, 64, 65, 130])
def test_greedy_at_every_place(vocab: int, device: str) -> None:
    """Of equal logits the first; -0 equals 0."""
    logits = torch.full((vocab, vocab), -1.0, device=device).fill_diagonal_(0.0)
    logits[:, -1] = -0.0
    assert_bitwise(sample(logits, 0).tokens, torch.arange(vocab, device=device))


def test_top_logprobs_among_many_equals(device: str) -> None:
    row = torch.zeros(1000, device=device)
    row[900] = 1.0
    assert sample(row[None], 0, num_logprobs=4).top_tokens.tolist() == [[900, 0, 1, 2]]


@pytest.mark.parametrize("vocab", [7, 1000])
def test_a_row_depends_on_its_seed_and_position_alone(vocab: int, device: str) -> None:
    rows = 20
    logits = torch.randn(rows, vocab, device=device)
    parameters = [
        torch.tensor([0.0, 0.7, 1.0, 1.5], device=device).repeat(rows // 4),
        torch.tensor([0, 5, 0, 3, 1], dtype=torch.int32, device=device).repeat(rows // 5),
        torch.tensor([1.0, 0.8], device=device).repeat(rows // 2),
        torch.tensor([0.0, 0.0, 0.1, 0.0, 0.3], device=device).repeat(rows // 5),
        torch.randint(-(2**63), 2**63 - 1, (rows,), device=device),
        torch.randint(0, 2**40, (rows,), device=device),
    ]
    modified = modifiers(rows, vocab, device)
    start, *entries = (modified.pop(name) for name in BIASES)
    parameters += modified.values()
    together = ops.sample(logits, *parameters, start, *entries, 3)
    for row in range(rows):
        one, own = slice(row, row + 1), slice(int(start[row]), int(start[row + 1]))
        own_start = start[row : row + 2] - start[row]
        alone = ops.sample(logits[one], *(p[one] for p in parameters), own_start, *(e[own] for e in entries), 3)
        for got, expected in zip(alone, together, strict=True):
            assert_bitwise(got, expected[one])
    if on_host(device):
        assert_bitwise(
            *per_thread_count(lambda: torch.cat([t.double().view(-1) for t in ops.sample(logits, *parameters)]))
        )


@pytest.mark.repeats
def test_random_numbers_of_different_keys_are_independent(device: str) -> None:
    """Two streams over 16 equal tokens agree in 1 of 16 draws; the seed's upper half, sign and position all count."""
    row, count = torch.zeros(16, device=device), 150 if emulated() else 4000
    streams = [draw(row, count, seeds=seed) for seed in (0, 1, -1, 2**32, 2**62)]
    streams.append(sample(row.repeat(count, 1), positions=torch.arange(count) + 2**32).tokens.cpu())
    for index, stream in enumerate(streams):
        for other in [*streams[index + 1 :], stream.roll(1)]:
            agreement = (stream == other).double().mean()
            assert abs(agreement - 1 / 16) < 4.5 * (1 / 16 * 15 / 16 / count) ** 0.5
    assert_bitwise(draw(row, count), streams[0])


UNUSABLE = {"NaN first": (0, torch.nan), "NaN": (8, torch.nan), "NaN last": (36, torch.nan), "+inf": (5, torch.inf)}


@pytest.mark.parametrize("parameters", [{"temperature": 0.0}, {}, {"top_k": 3, "top_p": 0.5}], ids=str)
@pytest.mark.parametrize("case", [*UNUSABLE, "-inf", "mask"])
def test_an_unusable_row(case: str, parameters: dict[str, Any], device: str) -> None:
    """Raises on the CPU; on a GPU it is marked, and the rows beside it are as ever."""
    logits = torch.randn(3, 37, device=device)
    options: dict[str, Any] = {"num_logprobs": 2}
    expected = sample(logits, **parameters, **options)
    if case in UNUSABLE:
        place, value = UNUSABLE[case]
        logits[1, place] = value
    elif case == "-inf":
        logits[1] = -torch.inf
    else:
        options["mask"] = torch.tensor([[-1, -1], [0, 0], [-1, -1]], dtype=torch.int32, device=device)
    if on_host(device):
        with pytest.raises(RuntimeError, match=r"\blogits\b.*\b1\b"):
            sample(logits, **parameters, **options)
        return
    got = sample(logits, **parameters, **options)
    for value, good in zip(got, expected, strict=True):
        assert_bitwise(value[[0, 2]], good[[0, 2]])
        assert value[1].eq(-1).all() if value.dtype == torch.int64 else value[1].isnan().all()


@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "min_p", "penalties"])
def test_parameters_out_of_range(name: str, device: str) -> None:
    """The CPU names them. A GPU must come to an end, with a token of the vocabulary or -1."""
    values: list[Any] = [-1] if name == "top_k" else [-1.0, torch.nan, torch.inf]
    logits = torch.randn(2, 1000, device=device)
    for value in values:
        column = torch.tensor([value, value], device=device, dtype=torch.int32 if name == "top_k" else torch.float32)
        parameters: dict[str, Any] = {"top_k": 3, "top_p": 0.5} | {name: column}
        if name == "penalties":
            parameters |= {"penalties": column[:, None].repeat(1, 3), "output_counts": torch.ones_like(logits).int()}
        if on_host(device):
            with pytest.raises(RuntimeError, match=rf"\b{name}\["):
                sample(logits, **parameters)
        else:
            tokens = sample(logits, **parameters).tokens
            assert ((tokens >= -1) & (tokens < 1000)).all()


GOOD: dict[str, Tensor] = {
    "logits": torch.zeros(3, 8),
    "temperature": torch.ones(3),
    "top_k": torch.zeros(3, dtype=torch.int32),
    "top_p": torch.ones(3),
    "min_p": torch.zeros(3),
    "seeds": torch.zeros(3, dtype=torch.int64),
    "positions": torch.zeros(3, dtype=torch.int64),
    "penalties": torch.ones(3, 3),
    "output_counts": torch.zeros(3, 8, dtype=torch.int32),
    "prompt_mask": torch.zeros(3, 1, dtype=torch.int32),
    "mask": torch.full((3, 1), -1, dtype=torch.int32),
    "bias_start": torch.tensor([0, 1, 1, 2], dtype=torch.int32),
    "bias_tokens": torch.tensor([7, 0], dtype=torch.int32),
    "bias_values": torch.ones(2),
}


@pytest.mark.parametrize("argument", [name for name in GOOD if name != "logits"])
@pytest.mark.parametrize("fault", ["dtype", "length", "dimensions", "strides"])
def test_parameter_errors_name_the_argument(argument: str, fault: str) -> None:
    good = GOOD[argument]
    strided = torch.stack([good, good], -1)[..., 0]
    bad = {"dtype": good.to(torch.int16), "length": good[:-1], "dimensions": good[:, None], "strides": strided}[fault]
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


@pytest.mark.parametrize("place", [1, 2])
def test_each_penalty_is_finite(place: int) -> None:
    penalties = torch.ones(3, 3)
    penalties[1, place] = torch.inf
    with pytest.raises(RuntimeError, match=rf"penalties\[1, {place}\] must be finite, got inf"):
        ops.sample(**(GOOD | {"penalties": penalties}))


def test_the_largest_vocabulary() -> None:
    with pytest.raises(RuntimeError, match="logits must have at most 16777216 columns, got 16777217"):
        sample(torch.empty(0, 2**24 + 1))
    assert sample(torch.empty(0, 2**24)).tokens.shape == (0,)


@pytest.mark.parametrize("argument", ["output_counts", "prompt_mask"])
def test_counts_without_penalties_are_an_error(argument: str) -> None:
    names = ["logits", "temperature", "top_k", "top_p", "min_p", "seeds", "positions", argument]
    with pytest.raises(RuntimeError, match=r"\bpenalties\b"):
        ops.sample(**{name: GOOD[name] for name in names})


@pytest.mark.parametrize("count", [-1, 21])
def test_too_many_logprobs_are_an_error(count: int) -> None:
    with pytest.raises(RuntimeError, match=r"\bnum_logprobs\b"):
        ops.sample(**GOOD, num_logprobs=count)
