"""Reasoning and tool calls in a model's output: one streaming parser, and the formats of many models as data."""

from fastinfer.server.parsing.events import Event, ReasoningDelta, TextDelta, ToolCallArguments, ToolCallStart
from fastinfer.server.parsing.region_parser import OutputParser, begun_answer
from fastinfer.server.parsing.spec import ParserSpec
from fastinfer.server.parsing.specs import SPECS, find_spec

__all__ = [
    "SPECS",
    "Event",
    "OutputParser",
    "ParserSpec",
    "ReasoningDelta",
    "TextDelta",
    "ToolCallArguments",
    "ToolCallStart",
    "begun_answer",
    "find_spec",
]
