"""Conversations with tools for chat templates that know none: all about tools becomes text of the messages."""

import json
import re
from collections.abc import Sequence
from typing import Any

from fastinfer.tokenizers.chat_messages import normalize

_INSTRUCTIONS = """# Tools

You may call functions to help with the user's request. Their signatures are between <tools></tools> tags, one per line:
<tools>
{tools}
</tools>

For each call, write a JSON object with the function's name and its arguments between <tool_call></tool_call> tags:
<tool_call>
{{"name": "function name", "arguments": {{"argument name": "value"}}}}
</tool_call>"""

# Some templates raise an error at a system message.
_NO_SYSTEM = re.compile(r"raise_exception\([^)]*(system role|only user and assistant)", re.IGNORECASE)


def with_tools(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], template: str
) -> list[dict[str, Any]]:
    """Return the conversation with the tools, their calls and their results as text; calls are those of Hermes models.

    Args:
        messages: the conversation.
        tools: the tools that the model may call; empty for none. Earlier calls become text in any case.
        template: the chat template's source.

    Raises:
        RequestError: a message is malformed.
    """
    written: list[dict[str, Any]] = []
    names: dict[str, str] = {}  # of the tools by the ids of their calls
    results: list[dict[str, Any]] = []  # parts of the message that has the results of calls
    for message in normalize(messages):
        if message["role"] == "tool":
            name = names.get(message.get("tool_call_id", ""))
            content = message["content"]
            parts = [content] if isinstance(content, str) else content
            for part in (f"The result of the call{f' of {name}' if name else ''} is:\n", *parts, "\n\n"):
                _append(results, part)
            continue
        _flush(results, written)
        if calls := message.pop("tool_calls", None):
            names |= {call["id"]: call["function"]["name"] for call in calls if "id" in call}
            text = "\n".join(_call(call["function"]) for call in calls)
            message["content"] = f"{message['content']}\n{text}".lstrip("\n")
        written.append(message)
    _flush(results, written)
    if tools:
        _add(written, _INSTRUCTIONS.format(tools="\n".join(map(_json, tools))), bool(_NO_SYSTEM.search(template)))
    return written


def _add(messages: list[dict[str, Any]], instructions: str, in_user_message: bool) -> None:
    """Add the instructions to the system message, or else to the first message of the user."""
    if in_user_message:
        first = next((message for message in messages if message["role"] == "user"), None)
    else:
        first = messages[0] if messages[0]["role"] == "system" else None
    if first is None:
        messages.insert(0, {"role": "user" if in_user_message else "system", "content": instructions})
    elif isinstance(first["content"], list):  # with images
        first["content"].insert(0, {"type": "text", "text": f"{instructions}\n\n"})
    elif in_user_message:
        first["content"] = f"{instructions}\n\n{first['content']}"
    else:
        first["content"] = f"{first['content']}\n\n{instructions}"


def _call(function: dict[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function.get("arguments", {})}
    return f"<tool_call>\n{_json(call)}\n</tool_call>"


def _append(parts: list[dict[str, Any]], part: str | dict[str, Any]) -> None:
    """Append a text or an image to a content; texts that follow one another become one."""
    if isinstance(part, str):
        part = {"type": "text", "text": part}
    if parts and "text" in part and "text" in parts[-1]:
        parts[-1]["text"] += part["text"]
    else:
        parts.append(dict(part))


def _flush(results: list[dict[str, Any]], messages: list[dict[str, Any]]) -> None:
    """Add results of tools as one message: some templates want the roles to alternate."""
    if results:
        # Without the request a small model repeats the results.
        _append(results, "Please answer with this.")
        messages.append({"role": "user", "content": results[0]["text"] if len(results) == 1 else list(results)})
        results.clear()


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False)
