"""The type of an argument that a model writes without one, as in ``<parameter=count>3</parameter>``."""

import json
from typing import NoReturn

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
}
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


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
        choices = schema.get(union)
        for choice in choices if isinstance(choices, list) else []:
            if isinstance(choice, dict) and isinstance(choice.get("type"), str):
                types.add(choice["type"])
    values = schema.get("enum")
    if not types and isinstance(values, list) and all(isinstance(value, str) for value in values):
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
    text = _PYTHON_WORDS.get(raw.strip(), raw.strip())
    if types != {"string"} and _fits(text, types):
        return text
    return json.dumps(raw, ensure_ascii=False)


def _fits(text: str, types: set[str]) -> bool:
    """Return whether the text is JSON of one of the types; with no types, of any."""
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    if isinstance(value, bool):
        return not types or "boolean" in types
    return not types or any(isinstance(value, _TYPES.get(name, ())) for name in types - {"boolean"})


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")
