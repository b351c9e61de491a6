"""What all requests share: strict types, and errors that name the field."""

import asyncio
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.requests import Request

from fastinfer.server.errors import APIError

# Parsing 1 MB takes about 10 ms, in which no other stream would get its tokens.
LARGE_BODY_BYTES = 64 << 10

Model = TypeVar("Model", bound="RequestModel")


class RequestModel(BaseModel):
    """Base of all requests.

    A field that is not declared is refused by its name, and so is a declared field of type ``None`` that has a value:
    those are fields of the interface that the server does not implement.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


async def parse(request: Request, model: type[Model], timeout: float) -> Model:
    """Read and validate the body of a request.

    Args:
        request: the request.
        model: its kind.
        timeout: seconds in which the body must have arrived.

    Raises:
        APIError: the body is late, is not JSON, or does not fit the model.
    """
    # Browsers send other types across origins without asking first; a page of the web must not use a local server.
    request.scope["fields"] = model.model_fields
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise APIError(415, f"Content-Type must be application/json, got {kind!r}")
    try:
        body = await asyncio.wait_for(request.body(), timeout)
    except asyncio.TimeoutError:
        raise APIError(408, f"the body must arrive within {timeout:g} s", code="body_timeout") from None
    try:
        parsed: Model
        if len(body) > LARGE_BODY_BYTES:
            parsed = await asyncio.to_thread(model.model_validate_json, body)
        else:
            parsed = model.model_validate_json(body)
        return parsed
    except ValidationError as error:
        raise explain(error, model) from None


def explain(error: ValidationError, model: type[RequestModel]) -> APIError:
    """Return the answer to a request that does not fit its model: the first mistake, and how many more there are."""
    mistakes = error.errors(include_url=False, include_context=False, include_input=False)
    first = mistakes[0]
    if first["type"] == "json_invalid":
        return APIError(400, f"the body must be JSON: {first['msg']}")
    param = _place(first["loc"])
    message = {
        "extra_forbidden": f"{param} is not a field of this request",
        "missing": f"{param} is missing",
        "none_required": f"{param} is not supported{_reason(model, param)}",
    }.get(first["type"], f"{param}: {first['msg']}" if param else f"the body must be an object: {first['msg']}")
    more = len(mistakes) - 1
    return APIError(400, message + (f" (and {more} more mistakes)" if more else ""), param=param or None)


def _place(location: tuple[int | str, ...]) -> str:
    """Write the place of a mistake as in ``messages[0].role``."""
    place = ""
    for part in location:
        place += f"[{part}]" if isinstance(part, int) else f".{part}"
    return place.removeprefix(".")[:200]


def _reason(model: type[RequestModel], param: str) -> str:
    """Return why a declared field is not supported, from its description."""
    field: Any = model.model_fields.get(param)
    return f": {field.description}" if field is not None and field.description else ""
