"""Rendering of chat messages as a prompt, with the Jinja template of the model's file."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from fastinfer.errors import RequestError, UnsupportedModelError
from fastinfer.tokenizers.chat_messages import Message, check_tools, normalize
from fastinfer.tokenizers.template_process import TemplateProcess
from fastinfer.utils.text import one_line

_process = TemplateProcess()
_MARK = "@@@"


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


def before_user_message(template: str, bos_token: str = "", eos_token: str = "") -> str:
    """Return what precedes a user's message: a model that continues it writes such a message, and then answers it.

    The method is that of Magpie, Xu et al., 2024, https://arxiv.org/abs/2406.08464. Arguments and errors are those of
    :func:`render`.
    """
    messages = [{"role": "user", "content": _MARK}]
    return render(template, messages, bos_token=bos_token, eos_token=eos_token).partition(_MARK)[0]
