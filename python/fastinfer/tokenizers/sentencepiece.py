"""SentencePiece's byte-pair encoding, from a vocabulary with scores.

Of all adjacent pieces whose join is a token, the pair with the best score is joined first, the leftmost of equals
(https://github.com/google/sentencepiece, T. Kudo, J. Richardson, arXiv:1808.06226). The tokenizers library does nearly
the same from a list of merges, but to make and load Gemma's 513,511 takes 7 times as long as all of this.
"""

import functools
import heapq
import re
from collections.abc import Mapping, Sequence

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel

from fastinfer.tokenizers.vocabulary import SPACE

# Words up to this length are looked up in a cache: there are few different ones in a text.
CACHED_LENGTH = 24
CACHED_WORDS = 1 << 15

_BETWEEN = "\ud800"  # in no token: a lone surrogate is no text


class SentencePieceBPE:
    """Text to token ids.

    Args:
        pieces: the tokens that joins can make, and their ids.
        scores: of every id.
        byte_ids: the ids of the 256 bytes, for characters that are no token; empty if the vocabulary has none.
        unknown_id: what stands for a run of such characters then; ``None`` leaves them out.
        control: spelling and id of the tokens that only ``parse_special`` finds in a text.
        user_defined: spelling and id of those that are found in any text.
        adds_space: a space goes in front of the text, and of what follows a control token.
        strips_after_control: white space after a control token belongs to it.
    """

    def __init__(
        self,
        pieces: Mapping[str, int],
        scores: Sequence[float],
        byte_ids: Sequence[int],
        unknown_id: int | None,
        control: Mapping[str, int],
        user_defined: Mapping[str, int],
        adds_space: bool = False,
        strips_after_control: frozenset[int] = frozenset(),
    ) -> None:
        self._pieces = pieces
        self._scores = scores
        self._byte_ids = byte_ids
        self._unknown_id = unknown_id
        self._adds_space = adds_space
        self._control = _Splitter(control, strips_after_control)
        self._user_defined = _Splitter(user_defined)
        # No join crosses a place where no token has a space after another character. Gemma's only such token is ">▁</".
        joined = set(re.findall(f"([^{SPACE}{_BETWEEN}]){SPACE}", _BETWEEN.join(pieces)))
        self._word_start = re.compile(f"(?<=[^{SPACE}{''.join(map(re.escape, joined))}])(?={SPACE})")
        self._cached = functools.lru_cache(CACHED_WORDS)(self._encode_word)

    def __call__(self, text: str, parse_special: bool) -> list[int]:
        ids: list[int] = []
        text = text.replace(SPACE, " ")
        for part in self._control.split(text) if parse_special else [text] * bool(text):
            if isinstance(part, int):
                ids.append(part)
                continue
            for fragment in self._user_defined.split(" " + part if self._adds_space else part):
                ids += [fragment] if isinstance(fragment, int) else self._encode_fragment(fragment)
        return ids if self._byte_ids else self._one_unknown_a_run(ids)

    def _encode_fragment(self, text: str) -> list[int]:
        ids: list[int] = []
        for word in self._word_start.split(text.replace(" ", SPACE)):
            ids += self._cached(word) if len(word) <= CACHED_LENGTH else self._encode_word(word)
        return ids

    def _encode_word(self, word: str) -> list[int]:
        ids = []
        for piece in self._join(word):
            if (known := self._pieces.get(piece)) is not None:
                ids.append(known)
            elif self._byte_ids:
                ids += [self._byte_ids[byte] for byte in piece.encode()]
            elif self._unknown_id is not None:
                ids.append(self._unknown_id)
        return ids

    def _join(self, word: str) -> list[str]:
        """The word's pieces, after n log n steps for n characters."""
        pieces = list(word)
        after = list(range(1, len(pieces) + 1))  # where the next piece begins; 0 for a piece that is part of another
        before = list(range(-1, len(pieces) - 1))
        queue: list[tuple[float, int, int, int]] = []  # cost, place of the left piece, of the right, length of both

        def offer(left: int, right: int) -> None:
            joined = pieces[left] + pieces[right]
            if (known := self._pieces.get(joined)) is not None:
                heapq.heappush(queue, (-self._scores[known], left, right, len(joined)))

        for place in range(len(pieces) - 1):
            offer(place, place + 1)
        while queue:
            _, left, right, length = heapq.heappop(queue)
            # Pieces only grow: with this length and these neighbours both are what they were when the pair was offered.
            if after[left] != right or len(pieces[left]) + len(pieces[right]) != length:
                continue
            pieces[left] += pieces[right]
            pieces[right] = ""
            following, after[right] = after[right], 0
            after[left] = following
            if following < len(pieces):
                before[following] = left
                offer(left, following)
            if before[left] >= 0:
                offer(before[left], left)
        return [piece for piece in pieces if piece]

    def _one_unknown_a_run(self, ids: list[int]) -> list[int]:
        unknown = self._unknown_id
        return [i for place, i in enumerate(ids) if i != unknown or not place or ids[place - 1] != unknown]


class _Splitter:
    """Finds the longest of many tokens in a text: the tokenizers library's automaton, with a model of one word."""

    def __init__(self, tokens: Mapping[str, int], strips_after: frozenset[int] = frozenset()) -> None:
        tokens = {token.replace(SPACE, " "): token_id for token, token_id in tokens.items() if token}
        # The library numbers added tokens in order; 0 is any text between them.
        self._ids = [0, *tokens.values()]
        self._backend = Backend(WordLevel({SPACE: 0}, unk_token=SPACE))
        self._backend.add_tokens([AddedToken(t, normalized=False, rstrip=i in strips_after) for t, i in tokens.items()])

    def split(self, text: str) -> list[int | str]:
        """Token ids and the strings between them; SentencePiece's sign for a space must not occur."""
        found = self._backend.encode(text)
        return [
            self._ids[number] if number else text[start:end]
            for number, (start, end) in zip(found.ids, found.offsets, strict=True)
        ]
