"""Values as JSON has them: its numbers are finite."""

import math
from typing import Any


def finite_json(value: Any) -> Any:
    """Return a JSON value with ``None`` in the place of every infinity and NaN."""
    if isinstance(value, dict):
        return {key: finite_json(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite_json(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
