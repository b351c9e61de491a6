"""The tokens and positions of prompts of modules."""

import pytest
from support.toy import ToyTokenizer

from fastinfer.engine.prompt_layout import Piece
from fastinfer.errors import RequestError
from fastinfer.prompt_schema import PromptModule, PromptParameter, PromptSchema, PromptUnion
from fastinfer.serving.modular_prompt import pieces_of

BOS_ID = 63
SCHEMA = PromptSchema(
    (
        PromptModule("a", "aa</s>"),
        PromptParameter("p", 4),
        PromptUnion((PromptModule("long", "ccccc"), PromptModule("short", "cc"))),
        PromptModule("d", "d"),
        PromptModule("empty", ""),
    )
)


class BeginningTokenizer(ToyTokenizer):
    def encode(
        self, text: str, add_special_tokens: bool = True, parse_special: bool = True, continues: bool = False
    ) -> list[int]:
        return [BOS_ID] * add_special_tokens + super().encode(text, add_special_tokens, parse_special, continues)


def pieces(tokenizer: ToyTokenizer, *modules: str, **parameters: str) -> list[Piece]:
    return pieces_of(tokenizer, SCHEMA.prompt("b</s>", modules=modules, parameters=parameters))  # type: ignore[arg-type]


def test_places() -> None:
    tokenizer, end = ToyTokenizer(), [2, 0]
    a, c, d = Piece([1, 1, 0], 0, True), Piece([3, 3], 7, True), Piece([4], 12, True)
    assert pieces(tokenizer, "d", "short", "a", p="b</s>") == [a, Piece([2, 19], 3), c, d, Piece(end, 13)]
    assert pieces(tokenizer, "long", p="") == [Piece([3] * 5, 7, True), Piece(end, 12)]
    assert pieces(tokenizer, "short") == [c, Piece(end, 9)]
    assert pieces(tokenizer) == [Piece(end, 0)]


def test_the_beginning_belongs_to_the_first_module() -> None:
    tokenizer, end = BeginningTokenizer(), [2, 0]
    assert pieces(tokenizer, "a") == [Piece([BOS_ID, 1, 1, 0], 0, True), Piece(end, 4)]
    assert pieces(tokenizer, "d") == [Piece([BOS_ID], 0), Piece([4], 13, True), Piece(end, 14)]


def test_a_value_that_is_too_long() -> None:
    with pytest.raises(RequestError, match="parameter 'p' must have at most 4 tokens, got 5"):
        pieces(ToyTokenizer(), p="bbbbb")
