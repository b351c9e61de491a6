"""Keys of the response cache: equal exactly if the engine would compute the same answer for the same tenant."""

import dataclasses
import functools
import hashlib
import json
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from fastinfer.sampling_params import SamplingParams

# Changes with the meaning of the keys or the form of the values, so that old entries of a Redis are not found.
FORMAT = 1
# What all keys begin with, of any model and format.
ALL = "fastinfer:"
# How an answer is delivered; everything else may change it. A new field is part of the key until it is listed here.
DELIVERY = frozenset({"output_kind"})


@dataclasses.dataclass(frozen=True)
class ModelIdentity:
    """Everything besides the request that decides an answer.

    Attributes:
        weights: fingerprint of what computes the answer, see :attr:`fastinfer.AsyncEngine.fingerprint`.
        adapter: digest of the LoRA adapter; empty for none.
        template: digest of the chat template; empty if the model has none.
        engine: version of the engine, and its limits on which answers depend.
    """

    weights: str
    adapter: str
    template: str
    engine: str


@functools.lru_cache(maxsize=1024)
def model_scope(model: ModelIdentity, tenant: str | None = None) -> str:
    """Return the prefix that the keys of one model and one tenant share, for flushing them together.

    Args:
        model: the model.
        tenant: name of the tenant that the server derives from the API key; tenants share no answers. ``None`` stands
            for all tenants.
    """
    scope = f"{ALL}{FORMAT}:{_digest(dataclasses.asdict(model))}:"
    return scope if tenant is None else f"{scope}{_digest(tenant)}:"


def cache_key(
    model: ModelIdentity,
    tenant: str,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    answer: Mapping[str, Any],
) -> str:
    """Return the key of a request, in printable ASCII.

    Args:
        model: the model that answers.
        tenant: name of the tenant; tenants share no answers.
        prompts: token ids of the rendered prompts.
        params: their sampling parameters.
        answer: what else parts answers, such as a cache salt.

    Raises:
        TypeError: a parameter has no canonical form, such as a logits processor.
        ValueError: a parameter is infinite or not a number.
    """
    try:
        # Most requests have the same parameters, whose digest takes longer than all the rest.
        digest = _kept_params_digest(params)
    except TypeError:  # a constraint that is given as a dictionary cannot be looked up
        digest = _params_digest(params)
    # A long prompt is hashed as bytes: as JSON it would hold up the event loop for milliseconds.
    ids = [hashlib.sha256(array("q", prompt)).hexdigest() for prompt in prompts]
    return model_scope(model, tenant) + _digest([ids, digest, answer])


def _params_digest(params: SamplingParams) -> str:
    return _digest({f.name: getattr(params, f.name) for f in dataclasses.fields(params) if f.name not in DELIVERY})


_kept_params_digest = functools.lru_cache(maxsize=256)(_params_digest)


def _digest(value: Any) -> str:
    text = json.dumps(_canonical(value), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _canonical(value: Any) -> Any:
    """Return a value in the one JSON form that stands for it: 1.0 is 1, tuples are lists, dataclasses are objects."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    if isinstance(value, Mapping):
        return {_name(name): _canonical(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_canonical(item) for item in value]
    if dataclasses.is_dataclass(value):
        return {f.name: _canonical(getattr(value, f.name)) for f in dataclasses.fields(value)}
    raise TypeError(f"a cached request must consist of JSON values, got {type(value).__name__}")


def _name(name: Any) -> str:
    """Return a mapping's key as JSON writes it, with its type: 1 and "1" differ."""
    if isinstance(name, bool) or not isinstance(name, int | str):
        raise TypeError(f"a mapping in a cached request must have keys of type int or str, got {type(name).__name__}")
    return json.dumps(name)
