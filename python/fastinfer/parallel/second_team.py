"""A model's view with other memory for exchanges, so that two steps of one model can exchange at the same time."""

from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

from fastinfer.parallel.group import Team

T = TypeVar("T")


def on_team(model: T, team: Team) -> T:
    """Return a model with the same tensors whose exchanges are those of another team.

    Parts that exchange nothing are shared, so that norms still find the sums that they were computed with.

    Args:
        model: a rank's part of a model, or a part of that.
        team: the same ranks with other memory.
    """
    return _replaced(model, team)  # type: ignore[no-any-return]


def _replaced(value: Any, team: Team) -> Any:
    if isinstance(value, Team):
        return team
    if type(value) is tuple:
        items = tuple(_replaced(item, team) for item in value)
        return items if _differ(items, value) else value
    if not is_dataclass(value) or isinstance(value, type):
        return value
    parts = {field.name: getattr(value, field.name) for field in fields(value)}
    changed = {name: _replaced(part, team) for name, part in parts.items()}
    return replace(value, **changed) if _differ(changed.values(), parts.values()) else value


def _differ(items: Any, others: Any) -> bool:
    return any(item is not other for item, other in zip(items, others, strict=True))
