"""Which requests use the cache."""

import pytest

from fastinfer.sampling_params import SamplingParams
from fastinfer.server.cache.policy import CacheUse, cache_use, is_complete

GREEDY = SamplingParams(temperature=0)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (GREEDY, True),
        (SamplingParams(seed=0), True),
        (SamplingParams(), False),
        (SamplingParams(top_k=1), False),
        (SamplingParams(temperature=0, logits_processors=[lambda tokens, logits: None]), False),
    ],
)
def test_deterministic_requests_alone(params: SamplingParams, expected: bool) -> None:
    assert cache_use(params, "") == CacheUse(read=expected, write=expected)


def test_sampled_answers_if_asked_for() -> None:
    assert cache_use(SamplingParams(), "", cache_sampled=True) == CacheUse(read=True, write=True)


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("no-cache", CacheUse(read=False, write=True)),
        ("No-Store", CacheUse(read=True, write=False)),
        ("max-age=0, no-cache ,no-store", CacheUse(read=False, write=False)),
        ("x-no-cache", CacheUse(read=True, write=True)),
    ],
)
def test_cache_control(header: str, expected: CacheUse) -> None:
    assert cache_use(GREEDY, header) == expected


@pytest.mark.parametrize(
    ("reasons", "expected"),
    [
        (["stop"], True),
        (["stop", "length"], True),
        (["stop", "abort"], False),
        (["error"], False),
        ([None], False),
        ([], False),
    ],
)
def test_cut_answers_are_not_complete(reasons: list[str | None], expected: bool) -> None:
    assert is_complete(reasons) is expected
