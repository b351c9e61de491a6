"""Values as JSON in bytes."""

import json
from typing import Any

import orjson


def dumps(value: Any) -> bytes:
    """Return a value as JSON.

    Schemas of clients and arguments of calls may have integers of more than 64 bits, which orjson refuses.
    """
    try:
        data: bytes = orjson.dumps(value)
    except TypeError:
        data = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    return data
