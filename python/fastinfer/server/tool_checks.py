"""Checks of the tools of a request."""

import asyncio
import contextlib
import re

from fastinfer.async_engine import AsyncEngine
from fastinfer.errors import RequestError
from fastinfer.server.errors import APIError
from fastinfer.server.parsing.answer_grammar import AnswerGrammar
from fastinfer.server.parsing.spec import CallMarkup
from fastinfer.server.protocol.chat import ChatRequest
from fastinfer.structured_output import StructuredOutputsParams
from fastinfer.utils.checks import show

# A request with bad tools may take this many seconds until it is known which one is bad.
SEARCH_S = 5.0

# Where a schema is in the grammar; that says nothing to a client.
_PLACE = re.compile(r"at \d+\(\d+\): failed to compile JSON schema: ")
_BARE = CallMarkup("%s", "")


def check_tools(body: ChatRequest) -> None:
    """Check names and schemas.

    Raises:
        APIError: two tools have the same name, or a schema is too large, too deep, not JSON, or of another type than
            object.
    """
    seen: set[str] = set()
    for index, tool in enumerate(body.tools or []):
        function = tool.function
        if function.name in seen:
            place = f"tools[{index}].function.name"
            raise APIError(400, f"{place}: there is another tool {function.name!r}", param=place)
        seen.add(function.name)
        if function.parameters is not None:
            try:
                StructuredOutputsParams(json=function.parameters)
            except RequestError as error:
                raise _bad_schema(index, error) from None
            declared = function.parameters.get("type")
            if declared is not None and "object" not in (declared if isinstance(declared, list) else [declared]):
                place = f"tools[{index}].function.parameters"
                message = f"{place}.type: expected object, as arguments have names, got {show(declared)}"
                raise APIError(400, message, param=place)


async def compile_tools(engine: AsyncEngine, body: ChatRequest, constraint: StructuredOutputsParams) -> None:
    """Compile a grammar that contains the schemas of tools.

    Raises:
        APIError: it cannot be enforced; the error names the tool at fault if it is found.
    """
    try:
        await engine.compile(constraint)
    except RequestError as error:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(_find_bad_tool(engine, body), SEARCH_S)
        # The whole grammar, with the schemas in it, is much longer than what is wrong with it.
        reason = str(error).partition(", got ")[0].replace("grammar cannot", "tools cannot", 1)
        raise APIError(400, reason, param="tools") from None


async def _find_bad_tool(engine: AsyncEngine, body: ChatRequest) -> None:
    """Compile the tools one by one.

    Raises:
        APIError: one cannot be enforced.
    """
    for index, tool in enumerate(body.tools or []):
        grammar = AnswerGrammar({})
        call = grammar.calls([tool.for_model(with_strict=True)], _BARE)
        try:
            await engine.compile(grammar.finish(call))
        except RequestError as error:
            raise _bad_schema(index, error) from None


def _bad_schema(index: int, error: RequestError) -> APIError:
    place = f"tools[{index}].function.parameters"
    reason = str(error).removeprefix("json ").removeprefix("grammar ").partition(", got ")[0]
    reason = _PLACE.sub("", reason)
    return APIError(400, f"{place} {reason}", param=place)
