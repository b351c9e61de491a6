"""A grammar over the toy's tokens, without a parser."""

from typing import Any

import numpy as np

from fastinfer.engine.engine import Engine
from fastinfer.errors import RequestError
from fastinfer.sampling_params import SamplingParams
from support.toy import ToyTokenizer


class Letters:
    """A grammar over the toy's tokens: a word of some letters, of a length; every fourth letter has to be x."""

    def __init__(self, letters: str, length: int, text: str = "") -> None:
        self.letters, self.length, self.text = letters, length, text

    @property
    def finished(self) -> bool:
        return len(self.text) == self.length

    def _allowed(self) -> str:
        return "" if self.finished else "x" if len(self.text) % 4 == 3 else self.letters

    def fill_mask(self, words: np.ndarray) -> None:
        if len(self.text) > self.length:
            raise RequestError("too long")
        words[:] = 0
        for letter in self._allowed():
            token = ord(letter) - ord("a") + 1
            words.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)

    def accept(self, token_id: int) -> None:
        letter = ToyTokenizer.pieces[token_id].decode(errors="replace")
        if len(letter) != 1 or letter not in self._allowed():  # the toy also has pieces of two letters and of half ones
            raise RequestError(f"{letter!r} is not allowed")
        self.text += letter

    def rollback(self, n: int) -> None:
        self.text = self.text[: len(self.text) - n]

    def replay(self, tokens: list[int]) -> None:
        self.text = ""
        for token in tokens:
            self.accept(token)

    def forced_tokens(self) -> list[int]:
        return [ord("x") - ord("a") + 1] if self._allowed() == "x" else []

    def validate(self, tokens: list[int]) -> int:
        copy = self.copy()
        for index, token in enumerate(tokens):
            try:
                copy.accept(token)
            except RequestError:
                return index
        return len(tokens)

    def copy(self) -> "Letters":
        return Letters(self.letters, self.length, self.text)


def constrained(engine: Engine, prompt: list[int], params: SamplingParams, grammar: Letters, **options: Any) -> str:
    """Queue a request that has been given this grammar."""
    request_id = engine.add_request(prompt, params, **options)
    for sequence in engine.requests.active[request_id].sequences:
        sequence.grammar = grammar.copy()  # type: ignore[assignment]
    return request_id
