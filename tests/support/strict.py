"""Strict validation of raw JSON by a client package's models, which by themselves let through any further field."""

from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import BaseModel, TypeAdapter


def check(kind: Any, data: str | bytes, further: Iterable[str] = ()) -> Any:
    """Return what the data means; fails if a field is missing, has another type, or is not in the model.

    Args:
        kind: a model of the package, or a union of them.
        data: JSON.
        further: fields that the model does not have and the server sends, as ``Choice.stop_reason``.
    """
    parsed = TypeAdapter(kind).validate_json(data, strict=True)
    found = set(_further(parsed)) - set(further)
    assert not found, f"{sorted(found)} are not in the interface: {data!r}"
    return parsed


def _further(value: Any) -> Iterator[str]:
    """Fields that the models have no place for."""
    if isinstance(value, BaseModel):
        yield from (f"{type(value).__name__}.{name}" for name in value.model_extra or {})
        for name in type(value).model_fields:
            yield from _further(getattr(value, name))
    elif isinstance(value, dict):
        for item in value.values():
            yield from _further(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _further(item)
