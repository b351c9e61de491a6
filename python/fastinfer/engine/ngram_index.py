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
        num_indexed: number of positions, from the first on, whose n-grams are in the index.
    """

    def __init__(self) -> None:
        self.guess: list[int] = []
        self.position = 0
        self.num_indexed = 0
        self._next: dict[tuple[int, ...], int] = {}  # n-gram to the position after it

    def extend(self, tokens: list[int], limit: int) -> int:
        """Add the n-grams before further positions of a text, and return the number of these positions.

        Args:
            tokens: the whole text; it must begin with the text of the previous call.
            limit: maximum number of positions.
        """
        first, last = self.num_indexed, min(len(tokens), self.num_indexed + limit)
        for end in range(max(first, 1), last):
            for n in NGRAM_LENGTHS:
                if n <= end:
                    self._next[tuple(tokens[end - n : end])] = end
        self.num_indexed = last
        return last - first

    def look_up(self, tokens: list[int], count: int) -> None:
        """Set ``guess`` to the tokens that followed the last indexed occurrence of the text's final n-gram.

        Args:
            tokens: the whole text, of which the index knows a beginning, see :meth:`extend`.
            count: number of tokens to guess.
        """
        self.position = len(tokens)
        found = (self._next.get(tuple(tokens[-n:])) for n in NGRAM_LENGTHS if n <= len(tokens))
        start = next((start for start in found if start is not None), len(tokens))
        # A guess that reaches the end of the text continues with the guess itself: the text is taken as periodic.
        self.guess = [tokens[start + i % (len(tokens) - start)] for i in range(count if start < len(tokens) else 0)]
