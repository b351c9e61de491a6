"""Guessing tokens ahead, so that one step can verify several of them.

A draft is accepted exactly if its token is the one that would have been drawn without it (see ``Sampler``): the text is
the same with and without speculation, greedy or sampled, with penalties and grammars; only the number of steps changes.
Leviathan et al., 2023, https://arxiv.org/abs/2211.17192; lookup in the text itself: Saxena, 2023,
https://github.com/apoorvumang/prompt-lookup-decoding.
"""

import statistics
from abc import ABC, abstractmethod
from collections import Counter, deque

from fastinfer.engine.scheduler import Chunk
from fastinfer.engine.sequence import Sequence

# Lengths of the n-grams that are looked up, the longest first. Single tokens were accepted too seldom to be of use.
NGRAM_LENGTHS = (4, 3, 2)
# A draft's chance before anything is known, and the weight of what the engine knows in a new sequence's estimate.
FIRST_ACCEPTANCE, PRIOR_WEIGHT = 0.5, 2.0
# The newest outcome's weight in the engine's own estimate, and how fast a sequence forgets.
LEARNING_RATE, MEMORY = 0.02, 0.9
# Drafts are given up to a multiple of so many tokens, as products compute them, or fewer than that: few sizes of steps,
# whose costs are soon known.
ROWS = 4
# The speed that n-grams must promise a batch, where all wait for a longer step and the one that ends early may leave
# its place empty: four answers that copied little ran at 0.93 of the speed of none with 1, at 0.94 with 1.15, at 0.98
# with 1.3; copies gain as much. Not for draft models, which have to be asked before they are known.
NGRAM_BATCH_GAIN = 1.3


class StepCosts:
    """Seconds of a step that decodes, by its number of tokens: measured, and guessed where it has not been.

    The guess: a step costs as much as reading the weights, and each token a third of that again (2 cores, 135M
    parameters in 4 bits: 1.83 times for 4 tokens, 2.8 for 8, 5.1 for 16).
    """

    SAMPLES, ENOUGH, STALE = 8, 3, 256

    def __init__(self) -> None:
        self._samples: dict[int, deque[float]] = {}
        self._medians: dict[int, float] = {}
        self._last_seen: dict[int, int] = {}
        self._num_steps = 0

    def add(self, num_tokens: int, seconds: float) -> None:
        self._num_steps += 1
        if num_tokens not in self._last_seen:
            self._last_seen[num_tokens] = self._num_steps
            return  # the first one records a graph
        self._last_seen[num_tokens] = self._num_steps
        samples = self._samples.setdefault(num_tokens, deque(maxlen=self.SAMPLES))
        samples.append(seconds)
        if len(samples) >= self.ENOUGH:
            self._medians[num_tokens] = statistics.median(samples)
        for stale in [n for n, step in self._last_seen.items() if self._num_steps - step > self.STALE]:
            del self._last_seen[stale]  # perhaps the machine was busy then
            self._samples.pop(stale, None)
            self._medians.pop(stale, None)

    def estimate(self, num_tokens: int) -> float:
        """Seconds; in units of their own while nothing is known."""
        if not self._medians:
            return 3.0 + num_tokens
        nearest = min(self._medians, key=lambda n: abs(n - num_tokens))
        return self._medians[nearest] * (3 + num_tokens) / (3 + nearest)


class Acceptance:
    """The share of drafts that were accepted lately."""

    def __init__(self, prior: float) -> None:
        self._accepted, self._total = prior * PRIOR_WEIGHT, PRIOR_WEIGHT

    def add(self, accepted: bool) -> None:
        self._accepted, self._total = MEMORY * self._accepted + accepted, MEMORY * self._total + 1

    @property
    def rate(self) -> float:
        return self._accepted / self._total


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

    def plan(self, sequences: list[Sequence]) -> None:
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

    def accept(self, chunk: Chunk, num_accepted: int) -> None:
        """Learn that so many of a chunk's drafts were right."""
        self.num_drafted += len(chunk.drafts)
        self.num_accepted += num_accepted
        for index in range(min(num_accepted + 1, len(chunk.drafts))):
            self._learn(chunk.sequence, index < num_accepted)

    def note_seconds(self, chunks: list[Chunk], seconds: float) -> None:
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
        expected tokens per second."""
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


class NgramSpeculator(Speculator):
    """Guesses that a text goes on as it did before, after the same few tokens. That costs next to nothing, so it
    guesses in every step, and learns from guesses that were not verified as well."""

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
