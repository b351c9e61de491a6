"""The type of an argument that a model writes without one, as in ``<parameter=count>3</parameter>``."""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn
from urllib.parse import unquote

from fastinfer.server.parsing.value_reader import PYTHON, MalformedError, read_value

# Schemas that refer to each other are looked at again until nothing changes, at most so often. What is known then may
# allow more types than the schemas do.
MAX_ROUNDS = 10

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
}
# Keywords beside which a reference is not all that there is to choose from.
_CHOOSING = frozenset({"const", "enum", "oneOf", "anyOf", "allOf"})
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_INTEGER = re.compile(r"[+-]?\d+", re.ASCII)
# Without two ways to match the same digits, which would take quadratic time.
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)


@dataclass(frozen=True)
class ArgumentType:
    """The types and the strings that a schema allows for an argument.

    Attributes:
        names: names of the types that are allowed; ``None`` for any.
        texts: strings among the values to choose from.
    """

    names: frozenset[str] | None = None
    texts: frozenset[str] = frozenset()

    @property
    def is_string(self) -> bool:
        """Whether only a string is valid."""
        return self.names == frozenset({"string"})

    def to_json(self, raw: str) -> str:
        """Return an argument's text as JSON of an allowed type, or else as a string."""
        text = raw.strip()
        found = None
        if not self.is_string and raw not in self.texts:
            found = self._json(_PYTHON_WORDS.get(text, text))
            if found is None and self.names is not None and "string" not in self.names:
                found = self._meant(text)
        return json.dumps(raw, ensure_ascii=False) if found is None else found

    def _allows(self, value: object) -> bool:
        if self.names is None:
            return True
        if isinstance(value, bool):
            return "boolean" in self.names
        return any(isinstance(value, _TYPES.get(name, ())) for name in self.names)

    def _json(self, text: str) -> str | None:
        """Return a text that is JSON of an allowed type."""
        try:
            value = json.loads(text, parse_constant=_refuse)
        except (ValueError, RecursionError):
            return None
        return text if self._allows(value) else None

    def _meant(self, text: str) -> str | None:
        """Return JSON for a text that is none, or none of an allowed type, but can be meant as one."""
        names = self.names or frozenset()
        if names & {"integer", "number"} and _NUMBER.fullmatch(text):
            return _number(text, "number" in names)
        if "boolean" in names and text.lower() in ("true", "1", "false", "0"):
            return "true" if text.lower() in ("true", "1") else "false"
        if names & {"array", "object"} and text[:1] in ("[", "(", "{"):
            found = _python_value(text)
            return None if found is None else self._json(found)
        return None


class ArgumentTypes:
    """The types of a tool's arguments.

    Args:
        parameters: JSON schema of all arguments. References are looked up in it.
    """

    def __init__(self, parameters: object) -> None:
        self._root = parameters
        self._properties: dict[str, Any] = {}
        for part in _parts(parameters, parameters):
            properties = part.get("properties")
            for key, schema in properties.items() if isinstance(properties, dict) else ():
                self._properties.setdefault(key, schema)
        self._names = _names(self._properties.values(), parameters)
        self._texts: dict[int, frozenset[str]] = {}

    def __getitem__(self, key: str) -> ArgumentType:
        schema = self._properties.get(key)
        if not isinstance(schema, dict):
            return ArgumentType()
        return ArgumentType(self._names[id(schema)], self._texts_of(schema))

    def _texts_of(self, schema: dict[str, Any]) -> frozenset[str]:
        """Return the strings to choose from; arguments may share a definition that has many."""
        followed = {id(schema)}
        while isinstance(target := _target(schema, self._root), dict) and not schema.keys() & _CHOOSING:
            if id(target) in followed:
                break
            followed.add(id(target))
            schema = target
        if id(schema) not in self._texts:
            choices = [value for part in _parts(schema, self._root) for value in _choices(part) or ()]
            self._texts[id(schema)] = frozenset(value for value in choices if isinstance(value, str))
        return self._texts[id(schema)]


def _parts(schema: object, root: object) -> Iterator[dict[str, Any]]:
    """Yield a schema and those that it combines or refers to, each once."""
    waiting = [schema]
    seen: set[int] = set()
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict) and id(part) not in seen:
            seen.add(id(part))
            yield part
            waiting += reversed(_next(part, root))


def _next(schema: dict[str, Any], root: object) -> list[object]:
    """Return the schemas that this one combines or refers to."""
    combined = [part for keyword in ("oneOf", "anyOf", "allOf") for part in _list(schema, keyword)]
    return [_target(schema, root), *combined]


def _names(schemas: Iterable[object], root: object) -> dict[int, frozenset[str] | None]:
    """Find the types that schemas allow, and all that they combine or refer to.

    Returns:
        The names of the types by the schema's ``id``; ``None`` for any type.
    """
    order = list(_dependencies_first(schemas, root))
    names: dict[int, frozenset[str] | None] = dict.fromkeys(map(id, order))
    for _ in range(MAX_ROUNDS):
        before = names.copy()
        for schema in order:
            names[id(schema)] = _combined(schema, root, names)
        if names == before:
            break
    return names


def _dependencies_first(schemas: Iterable[object], root: object) -> Iterator[dict[str, Any]]:
    """Yield schemas after those that they combine or refer to, unless these refer to them."""
    seen: set[int] = set()
    waiting = [(schema, False) for schema in schemas]
    while waiting:
        schema, is_done = waiting.pop()
        if not isinstance(schema, dict):
            continue
        if is_done:
            yield schema
        elif id(schema) not in seen:
            seen.add(id(schema))
            waiting.append((schema, True))
            waiting += [(part, False) for part in _next(schema, root)]


def _combined(schema: dict[str, Any], root: object, names: dict[int, frozenset[str] | None]) -> frozenset[str] | None:
    """Return what all keywords of a schema allow, given the types of other schemas by their ``id``."""
    limits = [_declared(schema), names.get(id(_target(schema, root)))]
    limits += [names.get(id(part)) for part in _list(schema, "allOf")]
    for keyword in ("anyOf", "oneOf"):
        cases = [names.get(id(part)) for part in _list(schema, keyword)]
        limits.append(_union(cases) if cases else None)
    if (choices := _choices(schema)) is not None:
        limits.append(frozenset(map(_type_of, choices)))
    known = [limit for limit in limits if limit is not None]
    if not known:
        return None
    return frozenset.intersection(*known) | ({"null"} if schema.get("nullable") is True else set())


def _declared(schema: dict[str, Any]) -> frozenset[str] | None:
    declared = schema.get("type")
    names = {name for name in (declared if isinstance(declared, list) else [declared]) if isinstance(name, str)}
    # An integer is a number, which matters if another keyword allows integers only.
    return frozenset(names | ({"integer"} if "number" in names else set())) if names else None


def _union(cases: list[frozenset[str] | None]) -> frozenset[str] | None:
    known = [case for case in cases if case is not None]
    return frozenset().union(*known) if len(known) == len(cases) else None


def _choices(schema: dict[str, Any]) -> list[Any] | None:
    """Return the values to choose from."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _type_of(value: object) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, float) and value.is_integer():
        return "integer"
    return next((name for name, types in _TYPES.items() if isinstance(value, types)), "")


def _list(schema: dict[str, Any], keyword: str) -> list[Any]:
    schemas = schema.get(keyword)
    return schemas if isinstance(schemas, list) else []


def _target(schema: dict[str, Any], root: object) -> object:
    """Return the schema that this one refers to within the root; ``None`` if it does not."""
    reference = schema.get("$ref")
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    target: object = root
    for part in unquote(reference).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(target, list) and name.isascii() and name.isdigit() and len(name) < 6:
            target = target[int(name)] if int(name) < len(target) else None
        else:
            target = target.get(name) if isinstance(target, dict) else None
    return target


def _number(text: str, allows_fractions: bool) -> str | None:
    """Return a number that JSON writes differently, such as 007 or .5; or 3.0, if it must be an integer."""
    try:
        value = int(text) if _INTEGER.fullmatch(text) else float(text)
    except ValueError:  # too many digits
        return None
    if isinstance(value, float):
        if not allows_fractions and value.is_integer():
            return str(int(value))
        if not allows_fractions or value in (float("inf"), float("-inf")):
            return None
    return json.dumps(value)


def _python_value(text: str) -> str | None:
    """Return JSON of a list or dict of Python; nothing is evaluated."""
    pieces: list[str] = []
    reader = read_value(text[0], pieces.append, PYTHON)
    try:
        next(reader)
        for character in text[1:]:
            reader.send(character)
    except (StopIteration, MalformedError):  # it ends early, or is no value
        return None
    try:
        reader.send(" ")
    except StopIteration:
        return "".join(pieces)
    except MalformedError:
        return None
    return None


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")
