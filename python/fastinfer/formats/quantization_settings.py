"""Access to the ``quantization_config`` of a checkpoint's config.json."""

import re
from collections.abc import Mapping
from typing import Any, TypeVar, overload

from fastinfer.errors import CheckpointFormatError, UnsupportedModelError

T = TypeVar("T")
D = TypeVar("D")

_REQUIRED: Any = object()

# A repeated group may take exponential time to match, and each open repetition multiplies the time by the length of a
# name: these four take a millisecond.
MAX_REPETITIONS = 4
_REPEATED_GROUP = re.compile(r"\)[*+?{]*[*+{]")


@overload
def setting(config: Mapping[str, Any], key: str, kind: type[T]) -> T: ...


@overload
def setting(config: Mapping[str, Any], key: str, kind: type[T], default: D) -> T | D: ...


def setting(config: Mapping[str, Any], key: str, kind: type[Any], default: Any = _REQUIRED) -> Any:
    """Get a value of a known type; ``null`` counts as missing.

    Raises:
        CheckpointFormatError: the value is missing and there is no default, or it has another type.
    """
    value = config.get(key)
    if value is None:
        if default is _REQUIRED:
            raise CheckpointFormatError(f"quantization_config: {key!r} is missing")
        return default
    if type(value) is not kind:
        raise CheckpointFormatError(f"quantization_config: {key!r}: expected {kind.__name__}, got {value!r:.90}")
    return value


def one_of(config: Mapping[str, Any], key: str, supported: tuple[T, ...], default: Any = _REQUIRED) -> T:
    """Get a value that must be one of the supported ones; strings are compared in lower case.

    Raises:
        UnsupportedModelError: the value is not supported.
    """
    value = setting(config, key, type(supported[0]), default)
    value = value.lower() if isinstance(value, str) else value
    if value not in supported:
        names = ", ".join(str(name) for name in supported)
        raise UnsupportedModelError(f"quantization_config: {key} {value!r} is not implemented; supported: {names}")
    return supported[supported.index(value)]


def refuse(config: Mapping[str, Any], *keys: str) -> None:
    """Refuse settings that change the meaning of the tensors and are not implemented; off or empty ones are allowed.

    Raises:
        UnsupportedModelError: one of the settings is on.
    """
    for key in keys:
        if config.get(key):
            raise UnsupportedModelError(f"quantization_config: {key!r} is not implemented, got {config[key]!r:.90}")


def refuse_dynamic(config: Mapping[str, Any]) -> None:
    """Refuse settings of single layers, as GPTQModel writes them, other than those of layers that are not quantised.

    These have "-:" before the pattern of their names, and their tensors show it.

    Raises:
        UnsupportedModelError: a layer has settings of its own.
        CheckpointFormatError: the setting is of the wrong type.
    """
    layers = setting(config, "dynamic", dict, {})
    refuse({"dynamic": {name: own for name, own in layers.items() if not name.startswith("-:")}}, "dynamic")


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Compile a regular expression for names of layers.

    Raises:
        UnsupportedModelError: matching may take too long.
        CheckpointFormatError: it is not a regular expression.
    """
    if _REPEATED_GROUP.search(pattern) or sum(pattern.count(sign) for sign in "*+{") > MAX_REPETITIONS:
        raise UnsupportedModelError(
            f"quantization_config: expected regular expressions with at most {MAX_REPETITIONS} repetitions and none of "
            f"a group, got {pattern!r:.90}"
        )
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise CheckpointFormatError(
            f"quantization_config: {pattern!r:.90} is not a regular expression ({error})"
        ) from None
