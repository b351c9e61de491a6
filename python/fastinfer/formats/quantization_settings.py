"""Access to the ``quantization_config`` of a checkpoint's config.json."""

from collections.abc import Mapping
from typing import Any, TypeVar, overload

from fastinfer.errors import CheckpointFormatError, UnsupportedModelError

T = TypeVar("T")
D = TypeVar("D")

_REQUIRED: Any = object()


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
