"""One step of the engine: schedule, run, sample, update."""

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass

from fastinfer.engine.batch_inputs import StepResult, num_logits_rows
from fastinfer.engine.block_manager import BlockManager
from fastinfer.engine.logits_row import LogitsRow, drop_impossible_drafts, logits_rows
from fastinfer.engine.request import Output, Request, SequenceStep
from fastinfer.engine.request_table import RequestTable
from fastinfer.engine.runner import Runner
from fastinfer.engine.sampled_token import SampledToken
from fastinfer.engine.sampler import Sampler
from fastinfer.engine.scheduler import Chunk, Scheduler
from fastinfer.engine.sequence import Sequence
from fastinfer.engine.speculation import Speculator
from fastinfer.errors import reason
from fastinfer.models import Model
from fastinfer.models.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """A chunk's part of a step's result.

    Attributes:
        chunk: what was computed.
        hidden_rows: the chunk's rows of the step's hidden states.
        tokens: what was drawn, one token per row of logits.
    """

    chunk: Chunk
    hidden_rows: slice
    tokens: list[SampledToken]

    @property
    def num_accepted(self) -> int:
        """How many of the drafts are the tokens that were drawn."""
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
        model: computes logits of prompts for requests that ask for them.
        runner: runs the model on a step's chunks.
        sampler: draws tokens.
        speculator: guesses tokens ahead, if anything does.
        scheduler: chooses the chunks.
        block_manager: decides which block holds which tokens.
        kv_caches: the memory of the blocks, of each model.
        requests: get the tokens.
    """

    model: Model
    runner: Runner
    sampler: Sampler
    speculator: Speculator | None
    scheduler: Scheduler
    block_manager: BlockManager
    kv_caches: list[KVCache]
    requests: RequestTable

    def __call__(self) -> list[Output]:
        """Run one step, and return the outputs of the requests that got something."""
        self.requests.queue_compiled()
        chunks, rows = self._choose_rows(self._schedule())
        outputs: list[Output] = []
        if chunks:
            result, tokens = self._compute(chunks, rows)
            outputs = self._update(chunks, result, tokens)
        return outputs + self.requests.pop_undelivered()

    def _schedule(self) -> list[Chunk]:
        """Choose what to compute, drafts included; wait a moment if there is nothing."""
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
        """Copy shared blocks for the sequences that are about to write into them."""
        if self.block_manager.pending_copies:
            for kv_cache in self.kv_caches:
                kv_cache.copy_blocks(self.block_manager.pending_copies)
            self.block_manager.pending_copies.clear()

    def _choose_rows(self, chunks: list[Chunk]) -> tuple[list[Chunk], list[LogitsRow]]:
        """The chunks to compute and their rows of logits, without the requests whose grammar fails here."""
        rows: dict[int, list[LogitsRow]] = {}
        errors: dict[str, Exception] = {}
        for index, chunk in enumerate(chunks):
            try:
                drop_impossible_drafts(chunk)
                rows[index] = logits_rows(chunk)
            except Exception as error:  # any error ends this request alone
                errors[chunk.sequence.request_id] = error
        kept = [index for index, chunk in enumerate(chunks) if chunk.sequence.request_id not in errors]
        for request_id, failure in errors.items():
            self.requests.fail(request_id, failure)
        return [chunks[index] for index in kept], [row for index in kept for row in rows[index]]

    def _compute(self, chunks: list[Chunk], rows: list[LogitsRow]) -> tuple[StepResult, list[SampledToken]]:
        """Run the model and draw a token for each row of logits."""
        start = time.perf_counter()
        result = self.runner(chunks)
        tokens = self.sampler.draw(result.logits, rows, result.recorded)
        if self.speculator is not None:
            self.speculator.record_seconds(chunks, time.perf_counter() - start)
        return result, tokens

    def _update(self, chunks: list[Chunk], result: StepResult, tokens: list[SampledToken]) -> list[Output]:
        """Give what was computed to the requests, and report those that have got a token or have ended."""
        touched: dict[str, Request] = {}
        to_report: dict[str, Request] = {}
        for part in _split(chunks, tokens):
            sequence, is_last = part.chunk.sequence, part.chunk.is_last
            request = touched[sequence.request_id] = self.requests.active[sequence.request_id]
            self._deliver(request, self._advance(part, result))
            if is_last or not request.unfinished:
                to_report[request.request_id] = request
        for request in touched.values():
            request.end_step(self.scheduler)
        return self.requests.report(to_report.values())

    def _advance(self, part: ChunkResult, result: StepResult) -> list[SequenceStep]:
        """Count a chunk's tokens as computed, and fork the siblings that have waited for the end of the prompt.

        Returns:
            What the chunk's sequence got, then what each sibling got.
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

        def step(owner: Sequence, tokens: list[SampledToken]) -> SequenceStep:
            return SequenceStep(self.model, owner, start, result.hidden, part.hidden_rows, tokens, is_last)

        own, others = part.tokens[: accepted + 1], part.tokens[1 : len(siblings) + 1]
        return [
            step(sequence, own),
            *(step(sibling, [token]) for sibling, token in zip(siblings, others, strict=True)),
        ]

    def _deliver(self, request: Request, steps: list[SequenceStep]) -> None:
        """Let a request take what its sequences got; any error ends this request alone."""
        try:
            for token in (token for step in steps for token in step.tokens):
                if token.error is not None:
                    raise token.error
            for step in steps:
                request.update(step)
        except Exception as error:
            request.finish("error", reason(error))
        else:
            self.block_manager.cache_full_blocks(steps[0].sequence)  # only now it has the accepted tokens


def _split(chunks: list[Chunk], tokens: list[SampledToken]) -> Iterator[ChunkResult]:
    """Divide a step's rows of hidden states and drawn tokens among its chunks."""
    end, drawn = 0, iter(tokens)
    for chunk in chunks:
        start, end = end, end + chunk.num_tokens + len(chunk.drafts)
        yield ChunkResult(chunk, slice(start, end), list(itertools.islice(drawn, num_logits_rows(chunk))))
