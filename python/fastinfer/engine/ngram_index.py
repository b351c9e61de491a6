"""Guessing a text's next tokens from the text itself (Saxena, 2023,
https://github.com/apoorvumang/prompt-lookup-decoding).
"""

# Lengths of the n-grams that are looked up, the longest first. Single tokens were accepted too seldom to be of use.
NGRAM_LENGTHS = (4, 3, 2)


class NgramIndex:
    """Where the n-grams of a text were followed by what, the newest occurrence of each.

    Attributes:
        guess: how the text may go on from ``position``; empty where nothing was found, or the guess has been verified.
    """

    def __init__(self) -> None:
        self.guess: list[int] = []
        self.position = 0
        self._next: dict[tuple[int, ...], int] = {}  # n-gram to the position after it

    def look_up(self, tokens: list[int], count: int) -> None:
        """Guess what follows the text: what followed the longest n-gram it ends with when that last occurred."""
        for end in range(max(self.position, 1), len(tokens)):
            for n in NGRAM_LENGTHS:
                if n <= end:
                    self._next[tuple(tokens[end - n : end])] = end
        self.position = len(tokens)
        found = (self._next.get(tuple(tokens[-n:])) for n in NGRAM_LENGTHS if n <= len(tokens))
        start = next((start for start in found if start is not None), len(tokens))
        # Near the end of the text it goes on with itself.
        self.guess = [tokens[start + i % (len(tokens) - start)] for i in range(count if start < len(tokens) else 0)]
