"""Keys of the response cache: equal exactly if the engine would compute the same answer for the same tenant."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from fastinfer.sampling_params import SamplingParams

# Changes with the meaning of the keys or the form of the values, so that old entries of a Redis are not found.
FORMAT = 1
# How an answer is delivered; everything else may change it. A new field is part of the key until it is listed here.
DELIVERY = frozenset({"output_kind"})


@dataclasses.dataclass(frozen=True)
class ModelIdentity:
    """Everything besides the request that decides an answer.

    Attributes:
        weights: fingerprint of the weights and of the precision, see :func:`fastinfer.models.fingerprint.fingerprint`.
        adapter: digest of the LoRA adapter; empty for none.
        template: digest of the chat template; empty for plain completions.
        engine: version of the engine.
    """

    weights: str
    adapter: str
    template: str
    engine: str


def model_scope(model: ModelIdentity, tenant: str) -> str:
    """Return the prefix that the keys of one model and one tenant share, for flushing them together.

    Args:
        model: the model.
        tenant: name of the tenant that the server derives from the API key; tenants share no answers.
    """
    return f"fastinfer:{FORMAT}:{_digest(dataclasses.asdict(model))}:{_digest(tenant)}:"


def cache_key(
    model: ModelIdentity,
    tenant: str,
    token_ids: Sequence[int],
    params: SamplingParams,
    answer: Mapping[str, Any],
) -> str:
    """Return the key of a request, in printable ASCII.

    Args:
        model: the model that answers.
        tenant: name of the tenant; tenants share no answers.
        token_ids: the rendered prompt.
        params: its sampling parameters.
        answer: what else shapes the answer: the route, the parsers of tool calls and reasoning, a cache salt.

    Raises:
        TypeError: a parameter has no canonical form, such as a logits processor.
        ValueError: a parameter is infinite or not a number.
    """
    fields = {f.name: getattr(params, f.name) for f in dataclasses.fields(params) if f.name not in DELIVERY}
    return model_scope(model, tenant) + _digest([list(token_ids), fields, answer])


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
