"""Access to the ``quantization_config`` of a checkpoint's config.json."""

from collections.abc import Mapping
from typing import Any, TypeVar

from fastinfer.errors import CheckpointFormatError, UnsupportedModelError

T = TypeVar("T")

_REQUIRED: Any = object()


def setting(config: Mapping[str, Any], key: str, kind: type[T], default: Any = _REQUIRED) -> T:
    """A value of a known type; ``None`` in the file is as good as no value.

    Raises:
        CheckpointFormatError: it is missing and there is no default, or its type is another one.
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
    """A value that must be one of a few; text is compared in lower case.

    Raises:
        UnsupportedModelError: it is another one.
    """
    value: Any = setting(config, key, type(supported[0]), default)
    value = value.lower() if isinstance(value, str) else value
    if value not in supported:
        names = ", ".join(str(name) for name in supported)
        raise UnsupportedModelError(f"quantization_config: {key} {value!r} is not implemented; supported: {names}")
    return value


def refuse(config: Mapping[str, Any], *keys: str) -> None:
    """Settings that change what the tensors mean, and that are not implemented unless they are off or empty.

    Raises:
        UnsupportedModelError: one of them is set.
    """
    for key in keys:
        if config.get(key):
            raise UnsupportedModelError(f"quantization_config: {key!r} is not implemented, got {config[key]!r:.90}")
