"""Twenty JSON schemas as users might give them. All strings and lists are bounded, so that each answer ends."""

from typing import Any

Schema = dict[str, Any]


def _object(**properties: Schema) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _list(items: Schema, most: int = 3, least: int = 1) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def _integer(low: int, high: int) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


def _one_of(*values: Any) -> Schema:
    return {"enum": list(values)}


_NAME: Schema = {"type": "string", "minLength": 1, "maxLength": 24}
_TEXT: Schema = {"type": "string", "maxLength": 80}
_FLAG: Schema = {"type": "boolean"}
_DATE: Schema = {"type": "string", "format": "date"}
_CODE: Schema = {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"}
_POINT = _object(x=_integer(-100, 100), y=_integer(-100, 100))

SCHEMAS: dict[str, Schema] = {
    "a person": _object(name=_NAME, age=_integer(0, 120), married=_FLAG),
    "an address": _object(street=_NAME, number=_integer(1, 999), city=_NAME, country=_one_of("DE", "FR", "SE", "UK")),
    "a product in a shop": _object(name=_NAME, code=_CODE, price_cents=_integer(1, 100_000), in_stock=_FLAG),
    "an invoice": _object(
        number=_CODE, date=_DATE, items=_list(_object(name=_NAME, count=_integer(1, 99))), paid=_FLAG
    ),
    "an event in a calendar": _object(title=_NAME, date=_DATE, minutes=_integer(5, 480), guests=_list(_NAME)),
    "the weather": _object(city=_NAME, celsius=_integer(-40, 50), sky=_one_of("clear", "cloudy", "rain", "snow")),
    "the mood of a review": _object(mood=_one_of("good", "bad", "mixed"), percent_sure=_integer(0, 100)),
    "a recipe": _object(name=_NAME, minutes=_integer(1, 300), ingredients=_list(_NAME, 4), steps=_list(_TEXT, 3)),
    "a book": _object(title=_NAME, author=_NAME, year=_integer(1450, 2030), topics=_list(_NAME)),
    "a film with its cast": _object(title=_NAME, cast=_list(_object(actor=_NAME, role=_NAME)), stars=_integer(1, 5)),
    "a call of a tool": _object(
        tool=_one_of("search", "open", "close"), arguments=_object(target=_NAME, limit=_integer(1, 9))
    ),
    "a triangle": _object(corners={**_list(_POINT), "minItems": 3}),
    "a contact, perhaps without telephone": _object(
        name=_NAME, phone={"anyOf": [{"type": "string", "pattern": "^[0-9]{6,12}$"}, {"type": "null"}]}
    ),
    "a quiz question": _object(question=_TEXT, answers=_list(_NAME, 4, 4), right=_integer(0, 3)),
    "a task": _object(title=_NAME, priority=_one_of(1, 2, 3), done=_FLAG, labels=_list(_NAME, 3, 0)),
    "a train connection": _object(start=_NAME, end=_NAME, changes=_integer(0, 9), minutes=_integer(1, 2000)),
    "a shape": {
        "oneOf": [
            _object(kind={"const": "circle"}, radius=_integer(1, 99)),
            _object(kind={"const": "square"}, side=_integer(1, 99)),
        ]
    },
    "a list of colours": _list(_one_of("red", "orange", "yellow", "green", "blue", "violet"), 6),
    "a company": _object(
        name=_NAME, founded=_integer(1600, 2030), offices=_list(_object(city=_NAME, staff=_integer(1, 9999)))
    ),
    "a measurement": _object(sensor=_CODE, taken=_DATE, values=_list(_integer(-999, 999), 8), valid=_FLAG),
}
