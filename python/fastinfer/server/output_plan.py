"""What a chat's output is constrained to, and how it is read: the place where the parser of tool calls plugs in."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from fastinfer.async_engine import AsyncEngine
from fastinfer.server.errors import APIError
from fastinfer.server.parsing.events import Event
from fastinfer.server.protocol.chat import ChatRequest
from fastinfer.serving.prompt import PreparedPrompt
from fastinfer.structured_output import StructuredOutputsParams


class AnswerParser(Protocol):
    """Divides one generated text into reasoning, text and tool calls."""

    def push(self, delta_text: str) -> list[Event]:
        """Read more of the text, and return what is found in it."""

    def finish(self) -> list[Event]:
        """End the text, and return what was held back."""


@dataclass(frozen=True)
class OutputPlan:
    """How a chat's output comes about and is read.

    Attributes:
        constraint: grammar of forced tool calls; ``None`` for none.
        make_parser: makes the parser of one choice; ``None`` if everything is text. The parser sees control tokens.
    """

    constraint: StructuredOutputsParams | None = None
    make_parser: Callable[[], AnswerParser] | None = None


def plan_output(body: ChatRequest, engine: AsyncEngine, prompt: PreparedPrompt) -> OutputPlan:
    """Return the plan of a request.

    Args:
        body: the request.
        engine: the engine, whose tokenizer has the chat template.
        prompt: the rendered prompt, which may end in open reasoning.

    Raises:
        APIError: the model may call tools.
    """
    if body.tools and body.tool_choice != "none":
        raise APIError(400, "tools are not supported yet", param="tools")
    return OutputPlan()
