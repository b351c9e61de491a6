"""Constraints on a text in the format of the parser, llguidance, and its errors in one line."""

import importlib.util
import json
import re
from typing import TYPE_CHECKING, Any

from fastinfer.errors import RequestError
from fastinfer.structured_output import StructuredOutputsParams
from fastinfer.utils.checks import show

if TYPE_CHECKING:
    from fastinfer.tokenizers.tokenizer import Tokenizer

# All options are set explicitly, so that a schema's own "x-guidance" cannot change any.
_JSON_OPTIONS: Any = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
    "whitespace_pattern": None,
    "coerce_one_of": False,
    "lenient": False,
}
_ANY_OBJECT = '{"type":"object"}'


def check_installed() -> None:
    """Require the package that follows grammars.

    Raises:
        RequestError: llguidance is not installed.
    """
    if importlib.util.find_spec("llguidance") is None:
        raise RequestError("structured output needs the package llguidance: pip install 'fastinfer[structured]'")


def check_syntax(params: StructuredOutputsParams) -> None:
    """Check a constraint as far as that is possible without a model; not of structural tags.

    Raises:
        RequestError: the schema, pattern or choice is invalid or not supported, or llguidance is not installed.
    """
    check_installed()
    from llguidance import LLMatcher

    try:
        message = LLMatcher.validate_grammar(grammar_source(params))
    except ValueError as error:
        message = str(error)
    if message:
        raise refusal(params, shorten(message))


def refusal(params: StructuredOutputsParams, reason: str) -> RequestError:
    """Return the error of a constraint that cannot be enforced."""
    return RequestError(f"{params.field} cannot be enforced: {reason}, got {show(getattr(params, params.field))}")


def grammar_source(params: StructuredOutputsParams, tokenizer: "Tokenizer | None" = None) -> str:
    """Return the grammar in llguidance's own format.

    Args:
        params: what the text must match.
        tokenizer: tokenizer of the model; only structural tags need it.

    Raises:
        ValueError: the grammar is malformed.
    """
    from llguidance import LLMatcher

    source: str
    if isinstance(params.json, str) or params.json_object:
        source = LLMatcher.grammar_from_json_schema(params.json or _ANY_OBJECT, overrides=_JSON_OPTIONS)
    elif params.grammar is not None:
        source = LLMatcher.grammar_from_lark(_lark(params.grammar))
    elif isinstance(params.structural_tag, str):
        assert tokenizer is not None
        source = LLMatcher.grammar_from_lark(_lark_of_tags(json.loads(params.structural_tag), tokenizer))
    elif params.regex is not None:
        source = LLMatcher.grammar_from_regex(params.regex)
    else:
        # As a regular expression of literals, 4,096 choices take 0.3 ms for the first mask; as a grammar rule of
        # strings they take 22 ms.
        source = LLMatcher.grammar_from_regex("|".join(map(_escape, params.choice or ())))
    return source


def _lark(grammar: str) -> str:
    """Return a grammar in GBNF or Lark's dialect in the latter.

    Raises:
        ValueError: it is malformed.
    """
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        lark: str = any_to_lark(grammar)
    except Exception as error:  # it raises plain Exception
        raise ValueError(shorten(str(error))) from None
    return lark


def _lark_of_tags(tags: dict[str, Any], tokenizer: "Tokenizer") -> str:
    """Return the Lark grammar of free text with structural tags.

    Raises:
        ValueError: some triggers are special tokens of the model, and others are text between angle brackets.
    """
    from llguidance import StructTag

    special = {tokenizer.token_bytes(token, skip_special_tokens=False).decode() for token in tokenizer.control_ids}
    bracketed = [t for t in tags["triggers"] if t.startswith("<") and t.endswith(">")]
    are_special = {trigger in special for trigger in bracketed}
    if len(are_special) > 1:
        raise ValueError(f"triggers must be special tokens of the model all or none, got {show(bracketed)}")
    structures = []
    for structure in tags["structures"]:
        schema = structure["schema"] | {"x-guidance": _JSON_OPTIONS}
        trigger = next(t for t in tags["triggers"] if structure["begin"].startswith(t))
        structures.append(StructTag(trigger=trigger, begin=structure["begin"], grammar=schema, end=structure["end"]))
    grammar: str = StructTag.to_grammar(structures, assume_special=True in are_special)
    return grammar


def _escape(text: str) -> str:
    """Return a regular expression that matches this text alone."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):X}}}" for c in text)


def shorten(message: str) -> str:
    """Shorten a message of llguidance to one line of at most 160 characters."""
    if "NoExtensionBias" in message:
        return "no text matches"
    if message.startswith("panic"):
        return "too complex"
    # The error of a regular expression has several lines with a drawing; one of them begins with "error:".
    if match := re.search(r"^error: (.*)$", message, re.MULTILINE):
        message = match[1]
    line = message.partition("\n")[0].partition(". Enable '")[0].strip()
    return line if len(line) <= 160 else line[:157] + "..."
