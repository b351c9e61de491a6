"""How often a text has each token, as the penalties want it."""

import numpy as np


class TokenCounts:
    """Counts of one sequence's tokens.

    Attributes:
        output: [vocab] int32; of each generated token.
        prompt: [ceil(vocab / 32)] int32; bit t % 32 of word t // 32 is 1 where the prompt has token t.
    """

    def __init__(self, prompt_token_ids: list[int], vocab_size: int) -> None:
        self.output = np.zeros(vocab_size, np.int32)
        words = np.zeros(-(-vocab_size // 32), np.uint32)
        tokens = np.unique(np.asarray(prompt_token_ids))
        np.bitwise_or.at(words, tokens // 32, np.uint32(1) << (tokens % 32).astype(np.uint32))
        self.prompt = words.view(np.int32)

    def add(self, token_id: int) -> None:
        self.output[token_id] += 1

    def copy(self) -> "TokenCounts":
        """Of a sequence that goes on from the same tokens; the prompt is shared, as it does not change."""
        copy = object.__new__(TokenCounts)
        copy.output, copy.prompt = self.output.copy(), self.prompt
        return copy
