"""An index of a text's n-grams, which predicts its next tokens from earlier occurrences.

The method is prompt lookup decoding (Saxena, 2023, https://github.com/apoorvumang/prompt-lookup-decoding).
"""

# Lengths of the n-grams that are looked up, the longest first. Guesses from single tokens were seldom right.
NGRAM_LENGTHS = (4, 3, 2)


class NgramIndex:
    """Maps each n-gram of one text to the position after its latest occurrence.

    Attributes:
        guess: predicted tokens from ``position`` on; empty if nothing was found, or after they were taken as drafts.
        position: length of the text in tokens at the last lookup.
    """

    def __init__(self) -> None:
        self.guess: list[int] = []
        self.position = 0
        self._next: dict[tuple[int, ...], int] = {}  # n-gram to the position after it

    def look_up(self, tokens: list[int], count: int) -> None:
        """Set ``guess`` to the tokens that followed the last earlier occurrence of the text's final n-gram.

        Args:
            tokens: the whole text; it must begin with the text of the previous call.
            count: number of tokens to guess.
        """
        for end in range(max(self.position, 1), len(tokens)):
            for n in NGRAM_LENGTHS:
                if n <= end:
                    self._next[tuple(tokens[end - n : end])] = end
        self.position = len(tokens)
        found = (self._next.get(tuple(tokens[-n:])) for n in NGRAM_LENGTHS if n <= len(tokens))
        start = next((start for start in found if start is not None), len(tokens))
        # A guess that reaches the end of the text continues with the guess itself: the text is taken as periodic.
        self.guess = [tokens[start + i % (len(tokens) - start)] for i in range(count if start < len(tokens) else 0)]
