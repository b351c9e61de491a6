import math
from typing import Any

import numpy as np
import pytest

from fastinfer.errors import RequestError
from fastinfer.sampling_params import SamplingParams

ODD_VALUES = [math.nan, math.inf, -math.inf, 1e308, 2**63, 2**20_000, -(2**63), True, "1", [1], b"1", 1j]


@pytest.mark.parametrize("field", ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "logprobs"])
def test_odd_values_are_refused_with_the_name_of_the_field(field: str) -> None:
    for value in ODD_VALUES:
        with pytest.raises(RequestError, match=rf"^{field} must be [^\n]*\d[^\n]*, got [^\n]{{1,70}}$"):
            SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("field", "refused", "accepted"),
    [
        ("temperature", [-0.01, 100.1, None], [0, 0.0, 1, 100]),
        ("top_p", [0, 0.0, -0.1, 1.01, None], [1e-6, 0.5, 1, 1.0]),
        ("top_k", [-2, 1.0, 2**31, None], [-1, 0, 1, 2**31 - 1]),
        ("min_p", [-0.1, 1.1, None], [0, 0.5, 1.0]),
        ("repetition_penalty", [0, 1e-38, 0.0099, 10.1, None], [0.01, 0.1, 1, 10.0]),
        ("max_tokens", [0, -1, 1.0, 2**31], [1, None, 2**31 - 1]),
        ("seed", [-1, 0.0], [0, 2**63 - 1, None]),
        ("logprobs", [-1, 21, 5.0], [0, 20, None]),
        ("ignore_eos", [0, 1, None, "yes"], [True, False]),
        ("skip_special_tokens", [0, 1, None, "no"], [True, False]),
        ("stop", ["", [""], ["a", ""], [1], 1, {"a": 1}, b"a", [2**20_000]], ["a", ["a", "bc"], ("a",), [], None]),
        ("stop_token_ids", [[-1], [True], [2**31], ["1"], [1.0], 3, "12"], [[0, 5], (1,), range(3), [], None]),
    ],
)
def test_ranges(field: str, refused: list[Any], accepted: list[Any]) -> None:
    for value in accepted:
        SamplingParams(**{field: value})
    for value in refused:
        with pytest.raises(RequestError, match=f"^{field} must be "):
            SamplingParams(**{field: value})


@pytest.mark.parametrize(("max_tokens", "limit"), [(7, 7), (None, 2**31 - 1)])
def test_no_more_tokens_are_demanded_than_allowed(max_tokens: int | None, limit: int) -> None:
    assert SamplingParams(max_tokens=max_tokens, min_tokens=limit).min_tokens == limit
    with pytest.raises(RequestError, match=rf"^min_tokens must be an integer in 0..{limit}, got {limit + 1}$"):
        SamplingParams(max_tokens=max_tokens, min_tokens=limit + 1)


@pytest.mark.parametrize("field", ["stop_token_ids", "kept_special_tokens", "allowed_token_ids"])
def test_arrays_are_refused_with_the_name_of_the_field(field: str) -> None:
    for ids in (np.array([1, 2]), np.array([])):
        with pytest.raises(RequestError, match=f"^{field} must be "):
            SamplingParams(**{field: ids})


def test_equal_however_given() -> None:
    assert SamplingParams(stop="a") == SamplingParams(stop=["a"])
    assert hash(SamplingParams(stop_token_ids=[1])) == hash(SamplingParams(stop_token_ids=(1,)))
    assert SamplingParams(stop=None) == SamplingParams()


def test_frozen() -> None:
    with pytest.raises(AttributeError):
        SamplingParams().seed = 1  # type: ignore[misc]
