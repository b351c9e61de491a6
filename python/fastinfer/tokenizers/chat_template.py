"""Rendering of chat messages as a prompt, with the Jinja template of the model's file."""

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from fastinfer.errors import RequestError, UnsupportedModelError
from fastinfer.tokenizers.chat_messages import Message, check_tools, normalize
from fastinfer.tokenizers.template_process import TemplateProcess
from fastinfer.utils.text import one_line

_process = TemplateProcess()
_MARK = "@@@"
_TESTS_CONTENT = re.compile(r"""(?<!\w)content['"]?\]? is (?:not )?none""")


def render(
    template: str | None,
    messages: Sequence[Message],
    add_generation_prompt: bool = True,
    bos_token: str = "",
    eos_token: str = "",
    **variables: Any,
) -> str:
    """Render a conversation in the prompt format that the model was trained on.

    The template writes all special tokens, including the beginning-of-text token, so encode the result with
    ``add_special_tokens=False``.

    Args:
        template: Jinja source, :attr:`fastinfer.tokenizers.tokenizer.Tokenizer.chat_template`.
        messages: messages with a "role" and a "content", a text or a list of parts of the type "text"; a template that
            reads lists alone gets lists. The content of one with "tool_calls" may be ``None``; other fields are passed
            on to the template.
        add_generation_prompt: whether to end with the text that starts the assistant's answer.
        bos_token, eos_token: spellings of the model's special tokens.
        variables: more variables of the template, such as ``tools`` and ``enable_thinking``, of types that JSON has.

    Returns:
        The prompt.

    Raises:
        UnsupportedModelError: there is no template, it is not valid Jinja, or the sandbox forbids what it does.
        RequestError: the messages are malformed, or the template refuses them, or takes too much time or memory.
    """
    if template is None:
        raise UnsupportedModelError("the model's file has no chat template; use generate with a plain prompt")
    normalized = normalize(messages)
    check_tools(variables.get("tools"))
    names = {"tools": None, "documents": None, "bos_token": bos_token, "eos_token": eos_token, **variables}
    if _reads_parts_alone(template):
        for message in normalized:
            if isinstance(message["content"], str):
                message["content"] = [{"type": "text", "text": message["content"]}]
    if any(message.get("tool_calls") for message in normalized):
        normalized = _with_call_form(normalized, *_call_form(template))
    names |= {"messages": normalized, "add_generation_prompt": add_generation_prompt}
    kind, text = _process.render(template, names)
    match kind:
        case "text":
            return text
        case "invalid":
            raise UnsupportedModelError(f"the model's chat template is not valid: {one_line(text)}")
        case "unsafe":
            raise UnsupportedModelError(f"the model's chat template is not safe to run: {one_line(text)}")
        case _:
            raise RequestError(f"messages: the model's chat template failed on them: {one_line(text)}")


@lru_cache
def _reads_parts_alone(template: str) -> bool:
    """Return whether a template leaves out a text, but not a list that has the text as its part.

    Those of some models with images go through a content's parts, which in a text are its characters.
    """

    def writes(content: str | list[dict[str, str]]) -> bool:
        names = {"tools": None, "documents": None, "bos_token": "", "eos_token": "", "add_generation_prompt": True}
        kind, text = _process.render(template, names | {"messages": [{"role": "user", "content": content}]})
        return kind == "text" and _MARK in text

    return not writes(_MARK) and writes([{"type": "text", "text": _MARK}])


@lru_cache
def writes_images(template: str, marker: str) -> bool:
    """Return whether a template writes a marker for an image in a user's content."""
    names = {"tools": None, "documents": None, "bos_token": "", "eos_token": "", "add_generation_prompt": True}
    content = [{"type": "image"}, {"type": "text", "text": _MARK}]
    kind, text = _process.render(template, names | {"messages": [{"role": "user", "content": content}]})
    return kind == "text" and marker in text and _MARK in text


@lru_cache
def _call_form(template: str) -> tuple[bool, bool]:
    """Return whether a message with tool calls has a content of ``None`` instead of "", and arguments as JSON text.

    Most templates take "" and an object. A few write tool calls only beside ``None``, or join the arguments to a text.
    """
    calls = [{"id": "0" * 9, "type": "function", "function": {"name": _MARK, "arguments": {_MARK: _MARK}}}]
    user: dict[str, Any] = {"role": "user", "content": "?"}
    messages = [user, {"role": "assistant", "content": "", "tool_calls": calls}]
    names = {"tools": None, "documents": None, "bos_token": "", "eos_token": "", "add_generation_prompt": True}
    contents = (True, False) if _TESTS_CONTENT.search(template) else (False,)
    for form in ((is_none, is_text) for is_none in contents for is_text in (False, True)):
        kind, text = _process.render(template, names | {"messages": _with_call_form(messages, *form)})
        if kind == "text" and text.count(_MARK) == 3 and not (form[0] and "None" in text):
            return form
    return False, False


def _with_call_form(messages: list[dict[str, Any]], is_none: bool, is_text: bool) -> list[dict[str, Any]]:
    """Return messages whose tool calls have this form, see :func:`_call_form`."""
    formed = []
    for message in messages:
        if calls := message.get("tool_calls"):
            message = {**message, "content": message["content"] or (None if is_none else "")}
            if is_text:
                texts = [json.dumps(call["function"]["arguments"], ensure_ascii=False) for call in calls]
                message["tool_calls"] = [
                    {**call, "function": {**call["function"], "arguments": text}}
                    for call, text in zip(calls, texts, strict=True)
                ]
        formed.append(message)
    return formed


def before_user_message(template: str, bos_token: str = "", eos_token: str = "") -> str:
    """Return what precedes a user's message: a model that continues it writes such a message, and then answers it.

    The method is that of Magpie, Xu et al., 2024, https://arxiv.org/abs/2406.08464. Arguments and errors are those of
    :func:`render`.
    """
    messages = [{"role": "user", "content": _MARK}]
    return render(template, messages, bos_token=bos_token, eos_token=eos_token).partition(_MARK)[0]
