"""SentencePiece's byte-pair encoding, for a vocabulary with scores.

Of all adjacent pieces that together are a token, the pair with the best score is joined first, the leftmost among
equals (https://github.com/google/sentencepiece, T. Kudo, J. Richardson, arXiv:1808.06226). The tokenizers library does
nearly the same with a list of merges, but making and loading the 513,511 merges of Gemma takes 7 times as long as this.
"""

import functools
import heapq
import re
from collections.abc import Mapping, Sequence

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel

from fastinfer.tokenizers.vocabulary import SPACE

# Words up to this length are cached, because a text has few different ones.
CACHED_LENGTH = 24
CACHED_WORDS = 1 << 15

_BETWEEN = "\ud800"  # a lone surrogate, which is in no token


class SentencePieceBPE:
    """Encoder from a text to token ids.

    Args:
        pieces: tokens that joins can make, with their ids.
        scores: scores of all ids.
        byte_ids: ids of the 256 byte tokens, for characters without a token; empty if the vocabulary has no byte
            tokens.
        unknown_id: token for a run of characters without a token, if there are no byte tokens; ``None`` to leave such
            characters out.
        control: spellings and ids of the tokens that are found in a text only with ``parse_special``.
        user_defined: spellings and ids of the tokens that are found in any text.
        adds_space: whether to add a space in front of a text, and after each control token.
        strips_after_control: control tokens that absorb the white space behind them.
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
        # Words start at a space, except behind a character that some token has in front of a space: no join crosses
        # such a start of a word. Gemma has only one token with a space behind another character, ">▁</".
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
        return ids if self._byte_ids else self._merge_unknowns(ids)

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
        """Join the characters of a word into pieces, in O(n log n)."""
        pieces = list(word)
        after = list(range(1, len(pieces) + 1))  # place of the next piece; 0 for a piece that was joined to another
        before = list(range(-1, len(pieces) - 1))
        queue: list[tuple[float, int, int, int]] = []  # cost, left place, right place, length of both

        def offer(left: int, right: int) -> None:
            joined = pieces[left] + pieces[right]
            if (known := self._pieces.get(joined)) is not None:
                heapq.heappush(queue, (-self._scores[known], left, right, len(joined)))

        for place in range(len(pieces) - 1):
            offer(place, place + 1)
        while queue:
            _, left, right, length = heapq.heappop(queue)
            # Pieces only grow, so if the neighbours and the length are unchanged, the pair is still the one offered.
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

    def _merge_unknowns(self, ids: list[int]) -> list[int]:
        """Keep one unknown token of each run."""
        unknown = self._unknown_id
        return [i for place, i in enumerate(ids) if i != unknown or not place or ids[place - 1] != unknown]


class _Splitter:
    """Search for the longest of many tokens in a text, with the automaton of the tokenizers library."""

    def __init__(self, tokens: Mapping[str, int], strips_after: frozenset[int] = frozenset()) -> None:
        tokens = {token.replace(SPACE, " "): token_id for token, token_id in tokens.items() if token}
        # The library gives added tokens consecutive ids from 1; 0 is any text between them.
        self._ids = [0, *tokens.values()]
        self._backend = Backend(WordLevel({SPACE: 0}, unk_token=SPACE))
        self._backend.add_tokens([AddedToken(t, normalized=False, rstrip=i in strips_after) for t, i in tokens.items()])

    def split(self, text: str) -> list[int | str]:
        """Split a text into token ids and the strings between them; it must not contain ``SPACE``."""
        [found] = self._backend.encode_batch([text])  # encode would not let other threads run meanwhile
        return [
            self._ids[number] if number else text[start:end]
            for number, (start, end) in zip(found.ids, found.offsets, strict=True)
        ]
