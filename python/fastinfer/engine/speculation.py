"""Guessing tokens ahead, so that one step can verify several of them.

A draft is accepted exactly if its token is the one that would have been drawn without it (see ``Sampler``): the text is
the same with and without speculation, greedy or sampled, with penalties and grammars; only the number of steps changes.
Leviathan et al., 2023, https://arxiv.org/abs/2211.17192; lookup in the text itself: Saxena, 2023,
https://github.com/apoorvumang/prompt-lookup-decoding.
"""

from abc import ABC, abstractmethod
from collections import Counter

from fastinfer.engine.acceptance import FIRST_ACCEPTANCE, LEARNING_RATE, Acceptance, StepCosts
from fastinfer.engine.ngram_index import NgramIndex
from fastinfer.engine.scheduler import Chunk
from fastinfer.engine.sequence import Sequence

# Drafts are given up to a multiple of so many tokens, as products compute them, or fewer than that: few sizes of steps,
# whose costs are soon known.
ROWS = 4
# The speed that n-grams must promise a batch, where all wait for a longer step and the one that ends early may leave
# its place empty: four answers that copied little ran at 0.93 of the speed of none with 1, at 0.94 with 1.15, at 0.98
# with 1.3; copies gain as much. Not for draft models, which have to be asked before they are known.
NGRAM_BATCH_GAIN = 1.3


class Speculator(ABC):
    """Decides how far ahead to guess, from what steps cost and from how many guesses were right; guesses nothing where
    that does not pay.

    Args:
        max_drafts: per sequence and step.

    Attributes:
        batch_gain: the speed, in that of none, that drafts must promise several sequences.
        num_drafted, num_accepted: tokens since the start.
    """

    batch_gain = 1.0

    def __init__(self, max_drafts: int) -> None:
        self.num_drafted = 0
        self.num_accepted = 0
        self._max_drafts = max_drafts
        self._costs = StepCosts()
        self._acceptance = FIRST_ACCEPTANCE

    @abstractmethod
    def num_available(self, sequence: Sequence) -> int:
        """How many tokens it could guess for a sequence."""

    @abstractmethod
    def propose(self, chunks: list[Chunk]) -> None:
        """Write each chunk's drafts, at most ``num_drafts``."""

    def draft_seconds(self) -> float:
        """What one more draft for every sequence costs beside its verification."""
        return 0.0

    def choose_num_drafts(self, sequences: list[Sequence]) -> None:
        """Decide how many drafts each running sequence may get in the next step."""
        decoding = [s for s in sequences if s.may_speculate and s.is_decoding and s.num_uncomputed_tokens]
        available = []
        for sequence in decoding:
            # The step brings one token more than it accepts drafts.
            limit = min(self._max_drafts, sequence.max_length - len(sequence) - 1)
            available.append(min(self.num_available(sequence), limit) if limit > 0 else 0)
        chosen = self._choose(decoding, available) if any(available) else available
        for sequence, count in zip(decoding, chosen, strict=True):
            sequence.num_drafts = count

    def record_accepted(self, chunk: Chunk, num_accepted: int) -> None:
        """Learn that so many of a chunk's drafts were right."""
        self.num_drafted += len(chunk.drafts)
        self.num_accepted += num_accepted
        for index in range(min(num_accepted + 1, len(chunk.drafts))):
            self._learn(chunk.sequence, index < num_accepted)

    def record_seconds(self, chunks: list[Chunk], seconds: float) -> None:
        """Learn how long a step took, without the guessing."""
        if all(chunk.sequence.is_decoding and chunk.num_tokens == 1 for chunk in chunks):
            self._costs.add(sum(1 + len(chunk.drafts) for chunk in chunks), seconds)

    def _learn(self, sequence: Sequence, accepted: bool) -> None:
        self._estimate(sequence).add(accepted)
        self._acceptance += LEARNING_RATE * (accepted - self._acceptance)

    def _estimate(self, sequence: Sequence) -> Acceptance:
        if sequence.acceptance is None:
            sequence.acceptance = Acceptance(self._acceptance)
        return sequence.acceptance

    def _choose(self, sequences: list[Sequence], available: list[int]) -> list[int]:
        """Each sequence's number of drafts: of all that are available so many, the likeliest first, as give the most
        expected tokens per second.
        """
        rates = [self._estimate(sequence).rate for sequence in sequences]
        likeliest = sorted(
            (-(rate**depth), depth, index)
            for index, (rate, count) in enumerate(zip(rates, available, strict=True))
            for depth in range(1, count + 1)
        )
        expected, deepest, best = float(len(sequences)), 0, 0
        best_speed = expected / self._costs.estimate(len(sequences))
        if len(sequences) > 1:
            best_speed *= self.batch_gain
        for taken, (unlikeliness, depth, _) in enumerate(likeliest, start=1):
            expected, deepest = expected - unlikeliness, max(deepest, depth)
            num_tokens = len(sequences) + taken
            if num_tokens > ROWS and num_tokens % ROWS:
                continue
            cost = self._costs.estimate(num_tokens) + deepest * self.draft_seconds()
            if expected / cost > best_speed:
                best, best_speed = taken, expected / cost
        chosen = Counter(index for _, _, index in likeliest[:best])
        return [chosen[index] for index in range(len(sequences))]


class NgramSpeculator(Speculator):
    """Guesses that a text goes on as it did before, after the same few tokens. That costs next to nothing, so it
    guesses in every step, and learns from guesses that were not verified as well.
    """

    batch_gain = NGRAM_BATCH_GAIN

    def num_available(self, sequence: Sequence) -> int:
        if sequence.ngrams is None:
            sequence.ngrams = NgramIndex()
        ngrams, tokens = sequence.ngrams, sequence.token_ids
        if ngrams.guess and ngrams.position < len(tokens):
            self._learn(sequence, tokens[ngrams.position] == ngrams.guess[0])
        ngrams.look_up(tokens, self._max_drafts)
        return len(ngrams.guess)

    def propose(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            ngrams = chunk.sequence.ngrams
            if chunk.num_drafts and ngrams is not None:
                chunk.drafts = ngrams.guess[: chunk.num_drafts]
                ngrams.guess = []
