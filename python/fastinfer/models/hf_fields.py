"""Checks and names that the readers of ``config.json`` share."""

from fastinfer.errors import CheckpointFormatError, UnsupportedModelError
from fastinfer.formats.json_fields import JsonFields
from fastinfer.models.config import MAX_SIZE

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "relu2": "relu2",
}


class Sizes:
    """Reader of sizes, integers from 1 to ``MAX_SIZE``; a default of 0 is allowed, too."""

    def __init__(self, fields: JsonFields) -> None:
        self._fields = fields

    def __call__(self, key: str, default: int | None = None) -> int:
        if default is None:
            return self._fields.get(key, int, minimum=1, maximum=MAX_SIZE)
        return self._fields.get(key, int, default, minimum=1, maximum=MAX_SIZE)


def require(fields: JsonFields, key: str, expected: object) -> None:
    """Refuse a model with another value; a missing one is the expected one."""
    value = fields.values.get(key)
    if value is not None and value != expected:
        wanted = "null" if expected is None else repr(expected)
        raise UnsupportedModelError(f"{fields.path}: {key} must be {wanted}, got {value!r:.80}")


def swiglu_limits(fields: JsonFields, key: str, num_layers: int) -> tuple[float, ...]:
    """Return the limit of SwiGLU in each layer, 0 for none, from a list that may be shorter or longer.

    Raises:
        CheckpointFormatError: a limit is negative, or no number.
    """
    listed = fields.get(key, list, None) or []
    numbers = [0.0 if limit is None else limit for limit in listed]
    if not all(type(limit) in (int, float) and 0 <= limit < 1e30 for limit in numbers):
        raise CheckpointFormatError(f"{fields.path}: {key}: expected numbers from 0, got {listed!r:.80}")
    return (*map(float, numbers), *(0.0,) * num_layers)[:num_layers]


def activation(fields: JsonFields, key: str, *, gated: bool = True) -> str:
    """Return the activation of an MLP that the files call by another name."""
    name = fields.get(key, str, "silu")
    known = [other for other, ours in ACTIVATIONS.items() if ours != ("relu2" if gated else "silu")]
    if name not in known:
        raise UnsupportedModelError(
            f"{fields.path}: {key} {name!r} is not implemented; supported are {', '.join(known)}"
        )
    return ACTIVATIONS[name]
