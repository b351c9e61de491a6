"""Access to the values of a JSON file, with checks of type and range."""

import json
import math
from pathlib import Path
from typing import Any, TypeVar, overload

from fastinfer.errors import FastinferError
from fastinfer.utils.regular_file import read_regular

T = TypeVar("T")
D = TypeVar("D")

_REQUIRED: Any = object()


class JsonFields:
    """JSON object whose values are checked when they are read.

    Args:
        path: path of the file, for error messages.
        values: the object.
        error: class of the error that is raised for a wrong value.
        prefix: path of the object within the file, such as ``"rope_scaling."``, for error messages.
    """

    def __init__(self, path: Path, values: dict[str, Any], error: type[FastinferError], prefix: str = "") -> None:
        self.path = path
        self.values = values
        self.error = error
        self._prefix = prefix

    @classmethod
    def read(cls, path: Path, error: type[FastinferError]) -> "JsonFields":
        """Read a file that contains one JSON object.

        Raises:
            FastinferError: the file is missing or does not contain a JSON object; the class is ``error``.
        """
        try:
            values = json.loads(read_regular(path))
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
        """Get a value of a known type and range; ``null`` counts as missing.

        Args:
            key: name of the value.
            kind: int, float (also accepts an int), bool, str, list or dict.
            default: result if the key is missing; without a default a missing key is an error.
            minimum, maximum: inclusive limits of a number.

        Raises:
            FastinferError: the key is missing, or its value has another type, is not finite or is out of range; the
                class is ``error``.
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
        """Get a list of exactly ``count`` numbers of magnitudes below 1e30.

        Raises:
            FastinferError: the key is missing or has another value; the class is ``error``.
        """
        values = self.get(key, list)
        if len(values) != count or not all(type(v) in (int, float) and abs(v) < 1e30 for v in values):
            raise self.error(f"{self.path}: {self._prefix}{key}: expected {count} numbers, got {values!r:.80}")
        return tuple(float(value) for value in values)

    def object(self, key: str) -> "JsonFields | None":
        """Get an object inside this one, or None if it is missing.

        Raises:
            FastinferError: the value is not an object; the class is ``error``.
        """
        values = self.get(key, dict, None)
        return None if values is None else JsonFields(self.path, values, self.error, f"{self._prefix}{key}.")

    def objects(self, key: str) -> "list[JsonFields]":
        """Get a list of objects.

        Raises:
            FastinferError: the key is missing, or its value is something else; the class is ``error``.
        """
        values = self.get(key, list)
        for index, value in enumerate(values):
            if not isinstance(value, dict):
                raise self.error(f"{self.path}: {self._prefix}{key}[{index}]: expected dict, got {value!r:.80}")
        return [
            JsonFields(self.path, value, self.error, f"{self._prefix}{key}[{index}].")
            for index, value in enumerate(values)
        ]
