"""Schemas of many kinds, each of which the grammars can enforce; keyed by what is special about it."""

_POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"type": "number"}},
    "required": ["x", "y"],
    "additionalProperties": False,
}

SCHEMAS: dict[str, dict] = {
    "object": _POINT,
    "any object": {"type": "object"},
    "enum": {"enum": ["red", "green", 3, None, {"a": [1, "ü"]}]},
    "const": {
        "type": "object",
        "properties": {"kind": {"const": "circle"}, "radius": {"type": "number", "exclusiveMinimum": 0}},
        "required": ["kind", "radius"],
        "additionalProperties": False,
    },
    "array with bounds": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 5},
    "array of objects": {"type": "array", "items": _POINT, "minItems": 1, "maxItems": 3},
    "tuple": {
        "type": "array",
        "prefixItems": [{"type": "string", "maxLength": 4}, {"type": "integer"}],
        "items": False,
    },
    "integer range": {"type": "integer", "minimum": -17, "maximum": 1234},
    "number range": {"type": "number", "minimum": -1.5, "exclusiveMaximum": 2.25},
    "multiple": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 700},
    "string lengths": {"type": "string", "minLength": 2, "maxLength": 6},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2,3}-[0-9]{4}$"},
    "pattern anywhere": {"type": "string", "pattern": "b[0-9]", "maxLength": 12},
    "format uuid": {"type": "string", "format": "uuid"},
    "format ipv4": {"type": "string", "format": "ipv4"},
    "format date-time": {"type": "string", "format": "date-time"},
    "format email": {"type": "object", "properties": {"to": {"type": "string", "format": "email"}}, "required": ["to"]},
    "optional properties": {
        "type": "object",
        "properties": {name: {"type": "integer", "minimum": 0, "maximum": 9} for name in ("a", "b", "c", "d")},
        "required": ["c"],
        "additionalProperties": False,
    },
    "additional properties": {
        "type": "object",
        "properties": {"id": {"type": "integer"}},
        "required": ["id"],
        "additionalProperties": {"type": "string", "maxLength": 5},
    },
    "pattern properties": {
        "type": "object",
        "patternProperties": {"^x-[a-z]{1,3}$": {"type": "null"}},
        "additionalProperties": False,
    },
    "nullable": {
        "type": "object",
        "properties": {"v": {"type": ["string", "null"], "maxLength": 3}},
        "required": ["v"],
    },
    "anyOf": {"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 4}, _POINT]},
    "oneOf": {
        "oneOf": [
            {"type": "object", "properties": {"cat": {"type": "boolean"}}, "required": ["cat"]},
            {"type": "array", "items": {"type": "null"}, "maxItems": 3},
        ]
    },
    "allOf": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"type": "object", "properties": {"b": {"type": "boolean"}}, "required": ["b"]},
        ],
    },
    "nested references": {
        "$defs": {
            "line": {
                "type": "object",
                "properties": {"from": {"$ref": "#/$defs/point"}, "to": {"$ref": "#/$defs/point"}},
                "required": ["from", "to"],
                "additionalProperties": False,
            },
            "point": _POINT,
        },
        "$ref": "#/$defs/line",
    },
    "recursion": {
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "maxLength": 3},
                    "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2},
                },
                "required": ["name", "children"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/tree",
    },
}
