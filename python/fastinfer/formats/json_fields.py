"""Values of a JSON file, checked for their type and range as they are read."""

import json
import math
from pathlib import Path
from typing import Any, TypeVar, overload

from fastinfer.errors import FastinferError

T = TypeVar("T")
D = TypeVar("D")

_REQUIRED: Any = object()


class JsonFields:
    """A JSON object.

    Args:
        path: of the file, named in errors.
        values: the object.
        error: class of what is raised for a wrong value.
        prefix: where in the file the object stands: ``"rope_scaling."``.
    """

    def __init__(self, path: Path, values: dict[str, Any], error: type[FastinferError], prefix: str = "") -> None:
        self.path = path
        self.values = values
        self.error = error
        self._prefix = prefix

    @classmethod
    def read(cls, path: Path, error: type[FastinferError]) -> "JsonFields":
        """Of a whole file.

        Raises:
            FastinferError: of the class ``error``: there is no such file, or it holds no JSON object.
        """
        try:
            values = json.loads(path.read_bytes())
        except OSError as problem:
            raise error(f"{path}: {problem.strerror}") from None
        except (ValueError, RecursionError) as problem:
            raise error(f"{path}: not JSON: {problem}") from None
        if not isinstance(values, dict):
            raise error(f"{path}: expected a JSON object, got {type(values).__name__}")
        return cls(path, values, error)

    @overload
    def get(self, key: str, kind: type[T], *, minimum: float | None = None, maximum: float | None = None) -> T: ...

    @overload
    def get(
        self, key: str, kind: type[T], default: D, *, minimum: float | None = None, maximum: float | None = None
    ) -> T | D: ...

    def get(
        self,
        key: str,
        kind: type[Any],
        default: Any = _REQUIRED,
        *,
        minimum: float | None = None,
        maximum: float | None = None,
    ) -> Any:
        """A value of a known type and range; ``null`` counts as missing.

        Args:
            kind: int, float (takes an int, too), bool, str, list or dict.
            default: what to return if the key is missing; without it a missing key is an error.
            minimum, maximum: inclusive limits of a number.
        """
        value = self.values.get(key)
        if value is None:
            if default is _REQUIRED:
                raise self.error(f"{self.path}: {self._prefix}{key} is missing")
            return default
        if kind is float and type(value) is int and abs(value) < 2**53:
            value = float(value)
        if type(value) is not kind:
            raise self.error(f"{self.path}: {self._prefix}{key}: expected {kind.__name__}, got {value!r:.80}")
        if kind is float and not math.isfinite(value):
            raise self.error(f"{self.path}: {self._prefix}{key}: expected a finite number, got {value}")
        if (minimum is not None and value < minimum) or (maximum is not None and value > maximum):
            limits = f"{'-inf' if minimum is None else minimum} to {'inf' if maximum is None else maximum}"
            raise self.error(f"{self.path}: {self._prefix}{key}: expected {limits}, got {value}")
        return value

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """A list of so many finite numbers."""
        values = self.get(key, list)
        if len(values) != count or not all(type(v) in (int, float) and abs(v) < 1e30 for v in values):
            raise self.error(f"{self.path}: {self._prefix}{key}: expected {count} numbers, got {values!r:.80}")
        return tuple(float(value) for value in values)

    def object(self, key: str) -> "JsonFields | None":
        """An object within this one."""
        values = self.get(key, dict, None)
        return None if values is None else JsonFields(self.path, values, self.error, f"{self._prefix}{key}.")
