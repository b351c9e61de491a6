"""Token counts of a sequence, which the penalties need."""

import numpy as np


class TokenCounts:
    """Counts of a sequence's generated tokens, and the set of its prompt tokens.

    Args:
        prompt_token_ids: token ids of the prompt.
        vocab_size: number of columns of the logits.

    Attributes:
        output: [vocab] int32; number of times that each token was generated.
        prompt: [ceil(vocab / 32)] int32; bit t % 32 of word t // 32 is 1 if token t occurs in the prompt.
    """

    def __init__(self, prompt_token_ids: list[int], vocab_size: int) -> None:
        self.output = np.zeros(vocab_size, np.int32)
        words = np.zeros(-(-vocab_size // 32), np.uint32)
        tokens = np.unique(np.asarray(prompt_token_ids))
        np.bitwise_or.at(words, tokens // 32, np.uint32(1) << (tokens % 32).astype(np.uint32))
        self.prompt = words.view(np.int32)

    def add(self, token_id: int) -> None:
        """Count a generated token."""
        self.output[token_id] += 1

    def copy(self) -> "TokenCounts":
        """Return independent counts with the same values; the prompt's array is shared, as it never changes."""
        copy = object.__new__(TokenCounts)
        copy.output, copy.prompt = self.output.copy(), self.prompt
        return copy
