"""Checks of values that users pass in; each raises a RequestError that names the field, its range and the value."""

import math
import os
from collections.abc import Iterable
from pathlib import Path

from fastinfer.errors import RequestError

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1


def check_int(name: str, value: object, low: int, high: int) -> None:
    """Require an integer in low..high; booleans and floats are refused, even 1.0."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise RequestError(f"{name} must be an integer in {low}..{high}, got {show(value)}")


def check_float(name: str, value: object, low: float, high: float, *, low_open: bool = False) -> None:
    """Require a finite number in [low, high], or in (low, high] with ``low_open``; booleans are refused."""
    valid = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(_as_float(value))
    if not valid or not low <= value <= high or (low_open and value == low):  # type: ignore[operator]
        raise RequestError(f"{name} must be a number in {'(' if low_open else '['}{low}, {high}], got {show(value)}")


def check_bool(name: str, value: object) -> None:
    """Require True or False; 0 and 1 are refused."""
    if not isinstance(value, bool):
        raise RequestError(f"{name} must be True or False, got {show(value)}")


def check_text(name: str, value: object) -> None:
    """Require a string."""
    if not isinstance(value, str):
        raise RequestError(f"{name} must be a string, got {show(value)}")


def check_path(name: str, value: object) -> None:
    """Require a string or a path object; paths of bytes are refused."""
    if not isinstance(value, str | os.PathLike) or not isinstance(os.fspath(value), str):
        raise RequestError(f"{name} must be a string or a path, got {show(value)}")


def check_new_folder(name: str, path: Path) -> None:
    """Require a folder that is not there yet, or is empty."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise RequestError(f"{name}: expected a new or empty folder, got {show_path(path)}")


def check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Require one of several strings."""
    if not isinstance(value, str) or value not in choices:
        raise RequestError(f"{name} must be one of {', '.join(choices)}, got {show(value)}")


def _as_float(value: int | float) -> float:
    """Convert to float; integers beyond the range of a float become infinite."""
    try:
        return float(value)
    except OverflowError:
        return math.inf


def show(value: object, limit: int = 60) -> str:
    """Print any value in at most ``limit`` characters, for an error message."""
    try:
        text = repr(value)
    except ValueError:  # Python does not print integers of more than 4,300 digits
        text = f"a gigantic {type(value).__name__}"
    return text if len(text) <= limit else text[: limit - 3] + "..."


def show_path(path: str | os.PathLike[str]) -> str:
    """Print a path or the name of a model in at most 200 characters."""
    return show(os.fspath(path), 200)
