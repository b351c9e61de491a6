"""Prompts of modules: the positions of their parts, and their tokens."""

from functools import lru_cache

from fastinfer.engine.prompt_layout import Piece
from fastinfer.errors import RequestError
from fastinfer.prompt_schema import ModularPrompt, PromptModule, PromptParameter, PromptSchema
from fastinfer.tokenizers.tokenizer import Tokenizer
from fastinfer.utils.checks import show


@lru_cache(maxsize=16)
def _places(tokenizer: Tokenizer, schema: PromptSchema) -> tuple[dict[str, Piece], list[int]]:
    """Return the place of each module and parameter by name, the latter without tokens, and the first tokens.

    The first tokens, which precede all parts, are those with which the tokenizer begins a text, if there are any.
    """
    beginning = tokenizer.encode("")
    position = len(beginning)
    places: dict[str, Piece] = {}
    for part in schema.parts:
        if isinstance(part, PromptParameter):
            places[part.name] = Piece([], position)
            position += part.max_tokens
            continue
        length = 0
        for module in (part,) if isinstance(part, PromptModule) else part.modules:
            token_ids = tokenizer.encode(module.text, add_special_tokens=False)
            places[module.name] = Piece(token_ids, position, is_module=True)
            length = max(length, len(token_ids))
        position += length
    return places, beginning


def pieces_of(tokenizer: Tokenizer, prompt: ModularPrompt) -> list[Piece]:
    """Tokenise a prompt of modules, each part by itself, and return the pieces of its layout.

    The text follows the last part that the prompt has.

    Raises:
        RequestError: the value of a parameter has more tokens than its place.
    """
    schema = prompt.schema
    places, beginning = _places(tokenizer, schema)
    pieces = [Piece(beginning, 0)]
    limits = {part.name: part.max_tokens for part in schema.parts if isinstance(part, PromptParameter)}
    for name, place in places.items():
        if name in prompt.modules:
            pieces.append(place)
        elif name in prompt.parameters:
            # What a user writes is no control token.
            value = tokenizer.encode(prompt.parameters[name], add_special_tokens=False, parse_special=False)
            if len(value) > limits[name]:
                raise RequestError(f"parameter {show(name)} must have at most {limits[name]} tokens, got {len(value)}")
            pieces.append(Piece(value, place.position))
    end = pieces[-1].position + len(pieces[-1].token_ids)
    pieces.append(Piece(tokenizer.encode(prompt.text, add_special_tokens=False), end))
    if beginning and pieces[1].is_module and pieces[1].position == len(beginning):  # the first module begins the text
        pieces[:2] = [Piece(beginning + pieces[1].token_ids, 0, is_module=True)]
    return [piece for piece in pieces if piece.token_ids]
