"""Lists and objects of requests. A body of 4 MB may have two million wrong items, and errors are large."""

from typing import Annotated, Any, TypeVar

from pydantic import Field, ValidatorFunctionWrapHandler, WrapValidator

# Entries of an object that are checked together.
GROUP_SIZE = 64

T = TypeVar("T")


def _in_groups(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """Check an object's entries group by group, up to the first group that has a mistake."""
    if not isinstance(value, dict) or len(value) <= GROUP_SIZE:
        return check(value)
    entries = list(value.items())
    checked: dict[str, Any] = {}
    for begin in range(0, len(entries), GROUP_SIZE):
        checked |= check(dict(entries[begin : begin + GROUP_SIZE]))
    return checked


# A list, checked up to its first wrong item.
Items = Annotated[list[T], Field(fail_fast=True)]
# An object with names of the client's choice.
Entries = Annotated[dict[str, T], WrapValidator(_in_groups)]
