"""Speculative decoding: tokens are drafted ahead, so that one step can verify several of them.

A draft is accepted if and only if it is the token that would have been drawn without speculation (see ``Sampler``). The
text is therefore the same with and without speculation, greedy or sampled, with penalties and with grammars; only the
number of steps changes. Speculative decoding: Leviathan et al., 2023, https://arxiv.org/abs/2211.17192. Prompt lookup
decoding: Saxena, 2023, https://github.com/apoorvumang/prompt-lookup-decoding.
"""

from abc import ABC, abstractmethod
from collections import Counter

from fastinfer.engine.acceptance import FIRST_ACCEPTANCE, LEARNING_RATE, Acceptance, StepCosts
from fastinfer.engine.chunk import Chunk
from fastinfer.engine.ngram_index import NgramIndex
from fastinfer.engine.sequence import Sequence

# With drafts, a step has at most this many tokens or a multiple of it, as the matrix products process tokens in groups
# of this size. Steps then have few different sizes, whose costs are soon known.
TOKEN_MULTIPLE = 4
# The gain in speed that n-gram drafts must promise before several sequences get any. All sequences wait for the longer
# step, and one that finishes early may leave its place in the batch empty. Speed of four answers that copied little,
# relative to no drafts: 0.93 with a required gain of 1, 0.94 with 1.15, 0.98 with 1.3; texts that copy much gain the
# same with all three. Draft models need no such gain: their quality is unknown until they have drafted.
NGRAM_BATCH_GAIN = 1.3
# Number of positions that are added to the n-gram indices of all sequences together before a step, which takes 0.6 ms.
# A longer prompt is indexed over several steps, most of them those that compute it.
MAX_INDEXED_POSITIONS = 512


class Speculator(ABC):
    """Drafts tokens, as many as pay off according to the measured costs of steps and the share of accepted drafts.

    Args:
        max_drafts: maximum number of drafts per sequence and step.

    Attributes:
        batch_gain: speed relative to no drafts that drafts must promise before several sequences get any.
        num_rounds: times since the start that a sequence got drafts.
        num_drafted: drafts since the start.
        num_accepted: accepted drafts since the start.
    """

    batch_gain = 1.0

    def __init__(self, max_drafts: int) -> None:
        self.num_rounds = 0
        self.num_drafted = 0
        self.num_accepted = 0
        self._max_drafts = max_drafts
        self._costs = StepCosts()
        self._acceptance = FIRST_ACCEPTANCE

    @abstractmethod
    def prepare_drafts(self, sequence: Sequence) -> int:
        """Prepare to draft for a sequence, and return the number of tokens that could be drafted."""

    @abstractmethod
    def propose(self, chunks: list[Chunk]) -> None:
        """Set the ``drafts`` of each chunk, at most its ``num_drafts``."""

    def follow(self, chunks: list[Chunk]) -> None:
        """Compute what follows from the model's step on chunks, once the step was launched."""
        return

    def draft_seconds(self, count: int) -> float:
        """Return the time in seconds to draft ``count`` tokens for every sequence, without their verification."""
        return 0.0

    def choose_num_drafts(self, sequences: list[Sequence]) -> None:
        """Set the ``num_drafts`` of each decoding sequence for the next step."""
        decoding = [
            s
            for s in sequences
            if s.may_speculate and s.is_decoding and s.num_uncomputed_tokens and not s.num_unknown_tokens
        ]
        available = []
        for sequence in decoding:
            # A step yields one token more than it accepts drafts.
            limit = min(self._max_drafts, sequence.max_length - len(sequence) - 1)
            available.append(min(self.prepare_drafts(sequence), limit) if limit > 0 else 0)
        chosen = self._choose(decoding, available) if any(available) else available
        for sequence, count in zip(decoding, chosen, strict=True):
            sequence.num_drafts = count

    def record_accepted(self, chunk: Chunk, num_accepted: int) -> None:
        """Update the estimates with the number of a chunk's drafts that were accepted."""
        self.num_rounds += bool(chunk.drafts)
        self.num_drafted += len(chunk.drafts)
        self.num_accepted += num_accepted
        for index in range(min(num_accepted + 1, len(chunk.drafts))):
            self._learn(chunk.sequence, index < num_accepted)

    def record_seconds(self, chunks: list[Chunk], seconds: float) -> None:
        """Update the costs with the time of a decode step, without the time for drafting."""
        if all(chunk.sequence.is_decoding and chunk.num_tokens == 1 for chunk in chunks):
            self._costs.add(sum(1 + len(chunk.drafts) for chunk in chunks), seconds)

    def _learn(self, sequence: Sequence, accepted: bool) -> None:
        """Update the estimates of a sequence and of the engine with the outcome of one draft."""
        self._estimate(sequence).add(accepted)
        self._acceptance += LEARNING_RATE * (accepted - self._acceptance)

    def _estimate(self, sequence: Sequence) -> Acceptance:
        """Return the sequence's estimate, which starts from the engine's."""
        if sequence.acceptance is None:
            sequence.acceptance = Acceptance(self._acceptance)
        return sequence.acceptance

    def _choose(self, sequences: list[Sequence], available: list[int]) -> list[int]:
        """Return the number of drafts for each sequence that gives the most expected tokens per second.

        Available drafts are added in the order of their probability of being accepted, which for the nth draft of a
        sequence is the nth power of its acceptance rate.

        Args:
            sequences: decoding sequences.
            available: number of drafts that each sequence could get.
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
        for taken, (negative_probability, depth, _) in enumerate(likeliest, start=1):
            expected, deepest = expected - negative_probability, max(deepest, depth)
            num_tokens = len(sequences) + taken
            if num_tokens > TOKEN_MULTIPLE and num_tokens % TOKEN_MULTIPLE:
                continue
            cost = self._costs.estimate(num_tokens) + self.draft_seconds(deepest)
            if expected / cost > best_speed:
                best, best_speed = taken, expected / cost
        chosen = Counter(index for _, _, index in likeliest[:best])
        return [chosen[index] for index in range(len(sequences))]


class NgramSpeculator(Speculator):
    """Drafts the tokens that followed the last earlier occurrence of the text's final n-gram.

    This costs almost nothing, so tokens are guessed in every step. The acceptance rate is also updated with
    guesses that were not drafted.
    """

    batch_gain = NGRAM_BATCH_GAIN

    def choose_num_drafts(self, sequences: list[Sequence]) -> None:
        room = MAX_INDEXED_POSITIONS
        for sequence in sequences:
            if sequence.may_speculate and sequence.samples and room:
                if sequence.ngrams is None:
                    sequence.ngrams = NgramIndex()
                room -= sequence.ngrams.extend(sequence.token_ids, room)
        super().choose_num_drafts(sequences)

    def prepare_drafts(self, sequence: Sequence) -> int:
        ngrams, tokens = sequence.ngrams, sequence.token_ids
        if ngrams is None:
            return 0
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
