"""The type of an argument that a model writes without one, as in ``<parameter=count>3</parameter>``."""

import json
from typing import Any, NoReturn

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
}
_PYTHON_WORDS = {"True": True, "False": False, "None": None}


def is_string(schema: object) -> bool:
    """Whether the schema says that only a string is valid."""
    return schema_types(schema) == {"string"}


def schema_types(schema: object) -> set[str]:
    """Return the names of the types that a schema allows, as far as it says so at its top."""
    if not isinstance(schema, dict):
        return set()
    declared = schema.get("type")
    types = {declared} if isinstance(declared, str) else set()
    if isinstance(declared, list):
        types |= {name for name in declared if isinstance(name, str)}
    for union in ("anyOf", "oneOf"):
        for choice in schema.get(union) if isinstance(schema.get(union), list) else []:
            if isinstance(choice, dict) and isinstance(choice.get("type"), str):
                types.add(choice["type"])
    if not types and isinstance(schema.get("enum"), list) and all(isinstance(v, str) for v in schema["enum"]):
        types.add("string")
    return types


def to_json(raw: str, schema: object) -> str:
    """Return an argument's text as JSON.

    Args:
        raw: what the model has written.
        schema: JSON schema of the argument; ``None`` if there is none.

    Returns:
        JSON of a type that the schema allows, or else a string.
    """
    types = schema_types(schema)
    if types != {"string"}:
        value = _parse(raw.strip())
        is_boolean = isinstance(value, bool)
        allowed = [kind for name in types for kind in _TYPES.get(name, ())] if types else [object]
        if value is not _NOTHING and any(
            isinstance(value, kind) and (not is_boolean or kind in (bool, object)) for kind in allowed
        ):
            return json.dumps(value, ensure_ascii=False)
    return json.dumps(raw, ensure_ascii=False)


_NOTHING: Any = object()


def _parse(text: str) -> Any:
    """Return the JSON value, or ``_NOTHING``."""
    if text in _PYTHON_WORDS:
        return _PYTHON_WORDS[text]
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return _NOTHING


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")
