"""Common base of all requests: strict types, and errors that name the field."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails
from starlette.requests import ClientDisconnect, Request

from fastinfer.server.disconnect import ClientGoneError
from fastinfer.server.errors import APIError
from fastinfer.server.protocol.one_of import ONE_OF
from fastinfer.utils.checks import show

# Parsing 1 MB takes about 10 ms, in which no other stream would get its tokens.
LARGE_BODY_BYTES = 64 << 10
# Fields of an object that no request has and that are still counted as mistakes.
MAX_UNKNOWN = 16

Model = TypeVar("Model", bound="RequestModel")
Result = TypeVar("Result")


class RequestModel(BaseModel):
    """Base of all requests.

    A field that is not declared is refused by its name, and so is a declared field of type ``None`` that has a value:
    those are fields of the interface that the server does not implement.

    Attributes:
        renamed: names of fields as errors of the library and of chats have them, and the request's own names of these;
            ``[]`` stands for any number.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())

    renamed: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="before")  # type: ignore[untyped-decorator]
    @classmethod
    def _leave_out_unknown(cls, given: Any) -> Any:
        """Leave out most fields that are not known if there are very many, since an error is kept for each."""
        if not isinstance(given, dict) or len(given) <= len(cls.model_fields) + MAX_UNKNOWN:
            return given
        known = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = [name for name in given if name not in known]
        kept = known.union(unknown[:MAX_UNKNOWN])
        return {name: value for name, value in given.items() if name in kept}

    def field_names(self) -> dict[str, str]:
        """Return the request's names of fields by the names that errors have."""
        return {**{name: name for name in type(self).model_fields}, **self.renamed}


async def parse(request: Request, model: type[Model], timeout: float) -> Model:
    """Read and validate the body of a request.

    Args:
        request: the request.
        model: its kind.
        timeout: seconds in which the body must have arrived.

    Raises:
        APIError: the body is late, is compressed, is not JSON, or does not fit the model.
        ClientGoneError: the client has gone before all of the body was there.
    """
    # Browsers send other types across origins without asking first; a page of the web must not use a local server.
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise APIError(415, f"Content-Type must be application/json, got {kind or 'none'}")
    if (encoding := request.headers.get("content-encoding", "identity").strip().lower()) != "identity":
        raise APIError(415, f"Content-Encoding must be identity or absent, got {encoding or 'an empty one'}")
    body = await read_body(request, timeout)

    def validate() -> Model:
        try:
            parsed: Model = model.model_validate_json(body)
        except ValidationError as error:
            raise explain(error, model) from None
        return parsed

    parsed = await convert(request, validate)
    request.scope["names"] = parsed.field_names()
    return parsed


async def convert(request: Request, function: Callable[[], Result]) -> Result:
    """Call a function of what is in a body that has been read, in a thread if the body is large."""
    if len(await request.body()) > LARGE_BODY_BYTES:
        return await asyncio.to_thread(function)
    return function()


async def read_body(request: Request, timeout: float) -> bytes:
    """Read the body of a request.

    Args:
        request: the request.
        timeout: seconds in which the body must have arrived.

    Raises:
        APIError: the body is late.
        ClientGoneError: the client has gone before all of the body was there.
    """
    try:
        return await asyncio.wait_for(request.body(), timeout)
    except asyncio.TimeoutError:
        raise APIError(408, f"the body must arrive within {timeout:g} s", code="body_timeout") from None
    except ClientDisconnect:
        raise ClientGoneError from None


def explain(error: ValidationError, model: type[RequestModel]) -> APIError:
    """Return the answer to a request that does not fit its model: the first mistake, and how many more there are."""
    mistakes = error.errors(include_url=False)
    first = mistakes[0]
    if first["type"] == "json_invalid":
        return APIError(400, f"the body must be JSON: {first['msg']}")
    param = _place(first["loc"])
    if first["type"] == ONE_OF:
        param, message = _explain_choice(param, first)
    else:
        message = {
            "extra_forbidden": f"{param} is not a field of this request",
            "missing": f"{param} is missing",
            "none_required": f"{param} is not supported{_reason(model, param)}",
        }.get(first["type"], f"{param}: {first['msg']}" if param else f"the body must be an object: {first['msg']}")
    more = len(mistakes) - 1
    return APIError(400, message + (f" (and {more} more mistakes)" if more else ""), param=param or None)


def _explain_choice(param: str, mistake: ErrorDetails) -> tuple[str, str]:
    """Return the place and the message of a value that is none of several kinds."""
    value, expected = mistake["input"], mistake["ctx"]
    key = expected["key"]
    if not isinstance(value, dict) or not expected["values"]:
        return param, f"{param} must be {expected['forms']}, got {show(value)}"
    param = f"{param}.{key}"
    if key not in value:
        return param, f"{param} is missing"
    return param, f"{param} must be one of {expected['values']}, got {show(value[key])}"


def _place(location: tuple[int | str, ...]) -> str:
    """Write the place of a mistake as in ``messages[0].role``."""
    place = ""
    for part in location:
        if isinstance(part, str) and ("[" in part or part in ("str", "int", "float", "bool")):
            continue  # the name of a type among several
        place += f"[{part}]" if isinstance(part, int) else f".{part}"
    return place.removeprefix(".")[:200]


def _reason(model: type[RequestModel], param: str) -> str:
    """Return why a declared field is not supported, from its description."""
    field: Any = model.model_fields.get(param)
    return f": {field.description}" if field is not None and field.description else ""
