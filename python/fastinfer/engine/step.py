"""One step of the engine: schedule sequences, run the model, sample tokens, update requests."""

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass

from fastinfer.engine.batch_inputs import StepResult, num_logits_rows
from fastinfer.engine.block_manager import BlockManager
from fastinfer.engine.logits_row import LogitsRow, drop_impossible_drafts, logits_rows
from fastinfer.engine.request import Request, SequenceStep
from fastinfer.engine.request_table import RequestTable
from fastinfer.engine.runner import Runner
from fastinfer.engine.sampled_token import SampledToken
from fastinfer.engine.sampler import Sampler
from fastinfer.engine.scheduler import Chunk, Scheduler
from fastinfer.engine.sequence import Sequence, SequenceState
from fastinfer.engine.speculation import Speculator
from fastinfer.engine.stats import StepStats
from fastinfer.errors import describe_error
from fastinfer.models import Model
from fastinfer.models.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """The part of a step's result that belongs to one chunk.

    Attributes:
        chunk: the chunk that was computed.
        hidden_rows: the chunk's rows of the step's hidden states.
        tokens: drawn tokens, one per row of logits.
    """

    chunk: Chunk
    hidden_rows: slice
    tokens: list[SampledToken]

    @property
    def num_accepted(self) -> int:
        """Number of drafts, from the first on, that equal the drawn tokens."""
        accepted = 0
        for draft, token in zip(self.chunk.drafts, self.tokens, strict=False):
            if draft != token.token_id:
                break
            accepted += 1
        return accepted


@dataclass(frozen=True)
class Step:
    """Computes the next tokens of all running sequences.

    Attributes:
        model: model for logits that only some requests need, such as those of a prompt.
        runner: runner of the model.
        sampler: sampler of the next tokens.
        speculator: source of draft tokens; ``None`` without speculation.
        scheduler: scheduler, which chooses the chunks to compute.
        block_manager: manager of the blocks of the KV caches.
        kv_caches: KV caches of the model and of the draft model, if there is one.
        requests: unfinished requests, which receive the tokens.
    """

    model: Model
    runner: Runner
    sampler: Sampler
    speculator: Speculator | None
    scheduler: Scheduler
    block_manager: BlockManager
    kv_caches: list[KVCache]
    requests: RequestTable

    def __call__(self) -> StepStats | None:
        """Run one step; the requests that made progress or ended leave their outputs in the table of requests.

        Returns:
            What the step did; ``None`` if there was nothing to compute.

        Any error of one request ends that request alone. After other errors, which are raised, no request has lost or
        gained a token and no block is lost; the next step computes the same tokens again.
        """
        start = time.perf_counter()
        try:
            self.requests.end_expired()
            self.requests.queue_compiled()
            chunks, rows = self._choose_rows(self._schedule())
        except BaseException:
            self.requests.repair()
            raise
        if not chunks:
            return None
        num_tokens = sum(chunk.num_tokens + len(chunk.drafts) for chunk in chunks)
        num_prompt_tokens = sum(_num_prompt_tokens(chunk) for chunk in chunks)
        result, tokens = self._compute(chunks, rows)
        num_generated = self._update(chunks, result, tokens)
        seconds = time.perf_counter() - start
        return StepStats(start, seconds, len(chunks), num_tokens, num_prompt_tokens, num_generated)

    def _schedule(self) -> list[Chunk]:
        """Return the chunks to compute, drafts included; wait for a moment if there are none."""
        if self.speculator is not None:
            self.speculator.choose_num_drafts(self.scheduler.running)
        chunks = self.scheduler.schedule()
        if chunks:
            self._copy_blocks()
            if self.speculator is not None:
                self.speculator.propose(chunks)
        else:
            self.requests.wait_for_work()
        return chunks

    def _copy_blocks(self) -> None:
        """Copy the shared blocks that sequences are about to write into."""
        if self.block_manager.pending_copies:
            for kv_cache in self.kv_caches:
                kv_cache.copy_blocks(self.block_manager.pending_copies)
            self.block_manager.pending_copies.clear()

    def _choose_rows(self, chunks: list[Chunk]) -> tuple[list[Chunk], list[LogitsRow]]:
        """Return the chunks to compute and their rows of logits.

        Requests whose grammar fails at this point end here, and their chunks are left out.
        """
        rows: dict[int, list[LogitsRow]] = {}
        errors: dict[str, Exception] = {}
        for index, chunk in enumerate(chunks):
            try:
                for sequence in (chunk.sequence, *chunk.sequence.siblings):
                    sequence.restore_grammar()
                drop_impossible_drafts(chunk)
                rows[index] = logits_rows(chunk)
            except Exception as error:  # any error ends this request alone
                errors[chunk.sequence.request_id] = error
        for request_id, failure in errors.items():
            self.requests.fail(self.requests.active[request_id], failure)
        # None are left if a request could only be ended by a repair.
        kept = [index for index, chunk in enumerate(chunks) if chunk.sequence.state is SequenceState.RUNNING]
        return [chunks[index] for index in kept], [row for index in kept for row in rows[index]]

    def _compute(self, chunks: list[Chunk], rows: list[LogitsRow]) -> tuple[StepResult, list[SampledToken]]:
        """Run the model and draw a token for each row of logits."""
        start = time.perf_counter()
        try:
            result = self.runner(chunks)
            tokens = self.sampler.draw(result.logits, rows, result.recorded)
        except BaseException:
            for chunk in chunks:
                chunk.sequence.grammar_is_valid = False
            raise
        if self.speculator is not None:
            self.speculator.record_seconds(chunks, time.perf_counter() - start)
        return result, tokens

    def _update(self, chunks: list[Chunk], result: StepResult, tokens: list[SampledToken]) -> int:
        """Pass the results to the requests, each of which is completely updated before the next one.

        Returns:
            The number of tokens that the requests got.
        """
        num_generated = 0
        parts: dict[str, list[ChunkResult]] = {}
        for part in _split(chunks, tokens):
            parts.setdefault(part.chunk.sequence.request_id, []).append(part)
        for request_id, its_parts in parts.items():
            request = self.requests.active[request_id]
            try:
                num_generated += self._update_request(request, its_parts, result)
            except BaseException as error:
                self.requests.discard(request, error)
                break  # the other sequences were queued anew: their results of this step will be computed again
        return num_generated

    def _update_request(self, request: Request, parts: list[ChunkResult], result: StepResult) -> int:
        """Update a request with the results of its sequences, and report it if it has a new token or has ended.

        Returns:
            The number of its new tokens.
        """
        has_news, num_generated = False, 0
        for part in parts:
            has_news |= part.chunk.is_last
            steps = self._advance(part, result)
            num_generated += sum(len(step.tokens) for step in steps)
            self._update_sequences(request, steps)
        request.end_step(self.scheduler)
        if has_news or not request.unfinished:
            self.requests.report(request)
        return num_generated

    def _advance(self, part: ChunkResult, result: StepResult) -> list[SequenceStep]:
        """Mark a chunk's tokens as computed, and fork the siblings once the prompt is complete.

        Returns:
            The results for the chunk's sequence and for each sibling, in this order.
        """
        chunk, sequence = part.chunk, part.chunk.sequence
        start, is_last, accepted = sequence.num_computed_tokens, chunk.is_last, part.num_accepted
        sequence.num_computed_tokens += chunk.num_tokens + accepted
        if self.speculator is not None:
            self.speculator.record_accepted(chunk, accepted)
        siblings: list[Sequence] = []
        if is_last:
            siblings, sequence.siblings = sequence.siblings, []
        for sibling in siblings:
            self.scheduler.fork(sequence, sibling)

        def step(receiver: Sequence, tokens: list[SampledToken]) -> SequenceStep:
            return SequenceStep(self.model, receiver, start, result.hidden, part.hidden_rows, tokens, is_last)

        own, others = part.tokens[: accepted + 1], part.tokens[1 : len(siblings) + 1]
        return [
            step(sequence, own),
            *(step(sibling, [token]) for sibling, token in zip(siblings, others, strict=True)),
        ]

    def _update_sequences(self, request: Request, steps: list[SequenceStep]) -> None:
        """Update a request with the results of a sequence and of those forked from it."""
        try:
            for token in (token for step in steps for token in step.tokens):
                if token.error is not None:
                    raise token.error
            for step in steps:
                request.update(step)
        except Exception as error:
            request.finish("error", describe_error(error))
        else:
            self.block_manager.cache_full_blocks(steps[0].sequence)  # after the accepted tokens were appended


def _num_prompt_tokens(chunk: Chunk) -> int:
    """Return how many of a chunk's tokens belong to the prompt."""
    left = chunk.sequence.num_prompt_tokens - chunk.sequence.num_computed_tokens
    return min(max(left, 0), chunk.num_tokens)


def _split(chunks: list[Chunk], tokens: list[SampledToken]) -> Iterator[ChunkResult]:
    """Divide a step's rows of hidden states and drawn tokens among its chunks."""
    end, drawn = 0, iter(tokens)
    for chunk in chunks:
        start, end = end, end + chunk.num_tokens + len(chunk.drafts)
        yield ChunkResult(chunk, slice(start, end), list(itertools.islice(drawn, num_logits_rows(chunk))))
