"""Keys: equal for requests with the same answer, different for everything else."""

import dataclasses
from typing import Any

import pytest

from fastinfer.sampling_params import RequestOutputKind, SamplingParams
from fastinfer.server.cache.key import DELIVERY, ModelIdentity, _params_digest, cache_key, model_scope
from fastinfer.structured_output import StructuredOutputsParams

MODEL = ModelIdentity(weights="w", adapter="", template="t", engine="0.1.0")
# A value of every field that is not its default.
OTHERS: dict[str, Any] = {
    "n": 2,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 3,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "logit_bias": {3: 1.0},
    "allowed_token_ids": [1, 2],
    "bad_words": ["x"],
    "max_tokens": 7,
    "min_tokens": 2,
    "stop": ["."],
    "stop_token_ids": [5],
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "seed": 0,
    "logprobs": 0,
    "prompt_logprobs": 0,
    "truncate_prompt_tokens": 5,
    "structured_outputs": StructuredOutputsParams(regex="a"),
    "skip_special_tokens": False,
    "kept_special_tokens": [5],
}


def key(params: SamplingParams | None = None, **changes: Any) -> str:
    parts: dict[str, Any] = {"model": MODEL, "tenant": "me", "prompts": [[1, 2, 3]], "answer": {"salt": "a"}}
    return cache_key(params=params or SamplingParams(), **parts | changes)


def test_every_parameter_is_part_of_the_key() -> None:
    """A field that is new in SamplingParams fails here until somebody has thought about it."""
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    assert names == set(OTHERS) | DELIVERY | {"logits_processors"}
    keys = [key(), *(key(SamplingParams(**{name: value})) for name, value in OTHERS.items())]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    "change",
    [
        {"tenant": "you"},
        {"tenant": ""},
        {"prompts": [[1, 2]]},
        {"prompts": [[12, 3]]},
        {"prompts": [[1, 2], [3]]},
        {"prompts": [[1], [2, 3]]},
        {"prompts": [[1, 2, 3], []]},
        {"answer": {"salt": "b"}},
        {"answer": {"salt": "a", "more": "x"}},
        *({"model": dataclasses.replace(MODEL, **{name: "other"})} for name in dataclasses.asdict(MODEL)),
    ],
    ids=str,
)
def test_everything_else_is_too(change: dict[str, Any]) -> None:
    assert key(**change) != key()


def test_equal_requests_have_equal_keys() -> None:
    for first, second in (
        ({"temperature": 0}, {"temperature": 0.0}),
        ({"stop": "x"}, {"stop": ["x"]}),
        ({"logit_bias": {1: 1, 2: 2}}, {"logit_bias": {2: 2.0, 1: 1.0}}),
    ):
        # Not their keys: equal parameters share one digest, which is kept.
        assert _params_digest(SamplingParams(**first)) == _params_digest(SamplingParams(**second))
    assert key(answer={"a": 1, "b": 2}) == key(answer={"b": 2, "a": 1})
    assert key(SamplingParams(output_kind=RequestOutputKind.DELTA)) == key()


def test_texts_cannot_imitate_structure() -> None:
    """Keys that joined texts without separators collided in other servers."""
    assert key(answer={"a": "b", "c": "d"}) != key(answer={"a": 'b","c":"d'})
    assert key(SamplingParams(stop=["a", "b"])) != key(SamplingParams(stop=["ab"]))
    assert key(answer={"a": {1: 0}}) != key(answer={"a": {"1": 0}})
    assert key(answer={"a": 1}) != key(answer={"a": "1"}) != key(answer={"a": True})
    assert key(answer={"a": 1}) != key(answer={"a": True})


def test_what_has_no_canonical_form_is_refused() -> None:
    with pytest.raises(TypeError, match="must consist of JSON values, got function"):
        key(SamplingParams(logits_processors=[lambda ids, logits: None]))
    with pytest.raises(TypeError, match="keys of type int or str, got float"):
        key(answer={"a": {0.5: 1}})
    with pytest.raises(ValueError, match="not JSON compliant"):
        key(answer={"a": float("nan")})


def test_keys_begin_with_the_scope_and_show_no_names() -> None:
    assert key().startswith(model_scope(MODEL, "me"))
    assert not key().startswith(model_scope(MODEL, "you"))
    assert key().startswith(model_scope(MODEL))
    assert not key().startswith(model_scope(dataclasses.replace(MODEL, weights="v")))
    assert key(tenant="geheim\n*").isascii()
    assert "geheim" not in key(tenant="geheim\n*")
