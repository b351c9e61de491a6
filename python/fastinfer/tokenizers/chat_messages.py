"""Messages of a conversation as users give them, in the form that chat templates take."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fastinfer.errors import RequestError
from fastinfer.utils.checks import show
from fastinfer.utils.text import one_line

Message = Mapping[str, Any]


def normalize(messages: object) -> list[dict[str, Any]]:
    """Check messages, and bring what the OpenAI API allows into the one form that templates expect.

    A content that is a list of parts becomes their texts, joined by newlines. With images, which have the type "image",
    it stays a list. A content of ``None``, which a message with tool calls may have, becomes "". Arguments of tool
    calls that are JSON text become an object. Everything else stays as it is.

    Args:
        messages: messages with a "role" and a "content".

    Returns:
        New messages, in the same order.

    Raises:
        RequestError: the messages are malformed, or have content other than text and images.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise RequestError(f"messages: expected a list of at least one message, got {one_line(show(messages))}")
    return [_normalize(message, f"messages[{index}]") for index, message in enumerate(messages)]


def check_tools(tools: object) -> None:
    """Check the tools that a template may offer to the model.

    Raises:
        RequestError: ``tools`` is neither ``None`` nor a list of dicts.
    """
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)):
        raise RequestError(f"tools: expected a list of dicts, got {one_line(show(tools))}")


def _normalize(message: object, place: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{place}: expected a dict, got {type(message).__name__}")
    if "role" not in message:
        raise RequestError(f"{place}: 'role' is missing")
    if not isinstance(message["role"], str):
        raise RequestError(f"{place}['role']: expected a str, got {type(message['role']).__name__}")
    for key in message:
        if not isinstance(key, str):
            raise RequestError(f"{place}: expected keys that are strings, got {one_line(show(key))}")
    normalized = dict(message)
    if calls := message.get("tool_calls"):
        normalized["tool_calls"] = _tool_calls(calls, f"{place}['tool_calls']")
    elif "content" not in message:
        raise RequestError(f"{place}: 'content' is missing")
    normalized["content"] = _content(message.get("content"), f"{place}['content']", may_be_none=bool(calls))
    return normalized


def _content(content: object, place: str, may_be_none: bool) -> str | list[dict[str, Any]]:
    """Return a message's content as one text, or as a list of texts and images."""
    if isinstance(content, str):
        return content
    if content is None and may_be_none:
        return ""
    if not isinstance(content, list):
        raise RequestError(f"{place}: expected a str or a list of parts, got {type(content).__name__}")
    texts, parts = list[str](), list[dict[str, Any]]()
    for index, part in enumerate(content):
        if isinstance(part, Mapping) and part.get("type") == "image":
            parts.append(dict(part))
            continue
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            got = f"{type(part.get('text')).__name__} as its text" if kind == "text" else one_line(show(kind))
            raise RequestError(f"{place}[{index}]: expected a part of type 'text' with a text, got {got}")
        texts.append(part["text"])
        parts.append({"type": "text", "text": part["text"]})
    return "\n".join(texts) if len(texts) == len(parts) else parts


def _tool_calls(calls: object, place: str) -> list[dict[str, Any]]:
    """Return tool calls whose arguments are objects."""
    if not isinstance(calls, list):
        raise RequestError(f"{place}: expected a list, got {type(calls).__name__}")
    normalized = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError(
                f"{place}[{index}]: expected a dict with a function that has a name, got {one_line(show(call))}"
            )
        arguments = _arguments(function.get("arguments", {}), f"{place}[{index}]['function']['arguments']")
        normalized.append({**call, "function": {**function, "arguments": arguments}})
    return normalized


def _arguments(arguments: object, place: str) -> dict[str, Any]:
    """Return a call's arguments as an object."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{place}: expected a JSON object, got text that is none: {one_line(error)}") from None
    if not isinstance(arguments, dict):
        raise RequestError(f"{place}: expected a JSON object, got {type(arguments).__name__}")
    return arguments
