"""A limit on the tokens of the reasoning: the text that ends it is forced when they are spent."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from fastinfer.server.parsing import OutputParser
from fastinfer.tokenizers.tokenizer import Tokenizer

# Reasoning begins in this part of an answer, if it does. To parse a long one would hold up other requests.
MAX_CHARS = 4096


@dataclass(frozen=True, eq=False)
class ReasoningBudget:
    """A logits processor.

    Attributes:
        num_tokens: largest number of tokens before the end of the reasoning.
        end_text, end: the text that ends it, and its tokens.
        make_parser: makes a parser of the answer, which says whether it is still in its reasoning.
        tokenizer: the model's tokenizer.
    """

    num_tokens: int
    end_text: str
    end: tuple[int, ...]
    make_parser: Callable[[], OutputParser]
    tokenizer: Tokenizer

    def __call__(self, tokens: Sequence[int], logits: Tensor) -> None:
        """Allow the next token of the end alone if the budget is spent.

        Args:
            tokens: the generated tokens.
            logits: [vocab] fp32, changed in place.
        """
        place = len(tokens) - self.num_tokens
        if not 0 <= place < len(self.end) or tuple(tokens[self.num_tokens :]) != self.end[:place]:
            return
        text = self.tokenizer.decode(list(tokens[: self.num_tokens]), skip_special_tokens=False)
        if self.end_text in text:
            return
        parser = self.make_parser()
        parser.push(text[:MAX_CHARS])
        if parser.is_reasoning:
            forced = logits[self.end[place]].item()
            logits.fill_(-math.inf)
            logits[self.end[place]] = max(forced, 0.0)
