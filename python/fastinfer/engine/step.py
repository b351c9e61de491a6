"""One step of the engine: schedule sequences, run the model, sample tokens, update requests."""

import time
from typing import NamedTuple

from torch import Tensor

from fastinfer.engine.batch_inputs import StepResult
from fastinfer.engine.block_manager import BlockManager
from fastinfer.engine.chunk import Chunk
from fastinfer.engine.draw import Draw
from fastinfer.engine.kv_offloading import KVOffloading
from fastinfer.engine.logits_row import LogitsRow, drop_impossible_drafts, logits_rows
from fastinfer.engine.request import Request, SequenceStep
from fastinfer.engine.request_table import RequestTable
from fastinfer.engine.sampled_token import SampledToken
from fastinfer.engine.sampler import Sampler
from fastinfer.engine.scheduler import Scheduler
from fastinfer.engine.sequence import SequenceState
from fastinfer.engine.speculation import Speculator
from fastinfer.engine.stats import StepStats, StepWork
from fastinfer.engine.worker import Worker
from fastinfer.errors import describe_error

# The part of a step's result that belongs to one chunk: the chunk, and the drawn tokens, one per row of logits.
_ChunkResult = tuple[Chunk, list[SampledToken]]


class Launched(NamedTuple):
    """A step that was launched and whose results have not been collected yet.

    Attributes:
        chunks: the chunks that it computes.
        result: tensors that the device writes; valid until the next step is launched.
        draw: the draw of the next tokens.
        start: time at which the step began, in seconds of ``time.perf_counter``.
        start_compute: time at which the model was launched.
    """

    chunks: list[Chunk]
    result: StepResult
    draw: Draw
    start: float
    start_compute: float


class Step:
    """Computes the next tokens of all running sequences.

    A step is launched, and its results are collected later. With ``runs_ahead`` the next step is launched in between,
    so that a GPU computes it while the host collects: its sequences begin with tokens that are still on the device.
    That is done if every sequence of the step may run ahead (:attr:`Sequence.may_run_ahead`), nothing is drafted, and
    no sequence would have to be preempted. A sequence that turns out to have ended computes one token in vain.

    Args:
        worker: worker of the model.
        draft_worker: worker of the draft model; ``None`` without one.
        sampler: sampler of the next tokens.
        speculator: source of draft tokens; ``None`` without speculation.
        scheduler: scheduler, which chooses the chunks to compute.
        block_manager: manager of the blocks of the KV caches.
        offloading: stores of blocks beyond the KV caches; ``None`` for none.
        requests: unfinished requests, which receive the tokens.
        runs_ahead: whether to launch a step before the results of the last one are known.

    Attributes:
        num_waited_steps: steps since the start that ``runs_ahead`` could not launch a step ahead of.
    """

    def __init__(
        self,
        *,
        worker: Worker,
        draft_worker: Worker | None,
        sampler: Sampler,
        speculator: Speculator | None,
        scheduler: Scheduler,
        block_manager: BlockManager,
        offloading: KVOffloading | None,
        requests: RequestTable,
        runs_ahead: bool,
    ) -> None:
        self._worker = worker
        self._workers = [worker] if draft_worker is None else [worker, draft_worker]
        self._sampler = sampler
        self._speculator = speculator
        self._scheduler = scheduler
        self._block_manager = block_manager
        self._offloading = offloading
        self._requests = requests
        self._runs_ahead = runs_ahead
        self.num_waited_steps = 0
        self._launched: Launched | None = None

    def __call__(self) -> StepStats | None:
        """Collect the results of a step, after the next one was launched if it may run ahead.

        The requests that made progress or ended leave their outputs in the table of requests.

        Returns:
            What the collected step did; ``None`` if there was nothing to compute.

        Any error of one request ends that request alone. After other errors, which are raised, no request has lost or
        gained a token and no block is lost; the next step computes the same tokens again.
        """
        try:
            launched = self._launched
            if launched is None or not any(map(is_wanted, launched.chunks)):
                launched = self._launch()
            if launched is None:
                return None
            is_overtaken = self._may_run_ahead_of(launched)
            self._launched = self._launch(launched.draw) if is_overtaken else None
            stats = self._collect(launched)
            self.num_waited_steps += self._runs_ahead and not is_overtaken
            self._save_blocks()
            return stats
        except BaseException:
            self._launched = None
            self._requests.repair()
            raise

    def forget_launched(self) -> None:
        """Forget a step that was launched for sequences that have ended meanwhile, and its tensors."""
        self._launched = None

    def _may_run_ahead_of(self, launched: Launched) -> bool:
        """Return whether the next step can be launched before this one's results are known."""
        return (
            self._runs_ahead
            and self._speculator is None
            and all(chunk.sequence.may_run_ahead for chunk in launched.chunks)
            # Each may need a block, and none can be preempted before its last token is known.
            and self._block_manager.num_available >= len(self._scheduler.running)
        )

    def _launch(self, drawn: Draw | None = None) -> Launched | None:
        """Launch a step; ``None`` if there is nothing to compute.

        Args:
            drawn: the draw of the last step, if its tokens are not known yet.
        """
        start = time.perf_counter()
        chunks, rows = self._choose(waits=drawn is None)
        if not chunks:
            return None
        start_compute = time.perf_counter()
        result = self._worker.run(chunks, rows, None if drawn is None else drawn.token_ids)
        draw = self._sampler.launch(result, rows)
        if self._speculator is not None:
            self._speculator.follow(chunks)
        self._mark_launched(chunks)
        return Launched(chunks, result, draw, start, start_compute)

    def _choose(self, waits: bool) -> tuple[list[Chunk], list[LogitsRow]]:
        """Return the chunks of the next step, which know their slots for states, and their rows of logits.

        Args:
            waits: see :meth:`_schedule`.
        """
        self._requests.begin_step()
        chunks, rows = self._choose_rows(self._schedule(waits))
        self._block_manager.place_states(chunks)
        self._save_blocks()  # snapshots that have made room for those of this step
        return chunks, rows

    def _mark_launched(self, chunks: list[Chunk]) -> None:
        """Count the chunks' tokens as computed, and the tokens that will be drawn as unknown."""
        row = 0
        for chunk in chunks:
            sequence = chunk.sequence
            sequence.num_computed_tokens += chunk.num_tokens
            if chunk.num_receivers:
                sequence.num_unknown_tokens += 1
                sequence.drawn_row = row
                row += chunk.num_rows
            if not chunk.drafts:
                self._block_manager.advance_states(chunk)

    def _schedule(self, waits: bool) -> list[Chunk]:
        """Return the chunks to compute, drafts included.

        Args:
            waits: whether to wait for a moment if there are none, as no earlier step has to be collected.
        """
        if self._speculator is not None:
            self._speculator.choose_num_drafts(self._scheduler.running)
        chunks = self._scheduler.schedule(is_ahead=not waits)
        self._save_blocks()
        if chunks:
            self._copy_blocks()
            if self._speculator is not None:
                self._speculator.propose(chunks)
        elif waits:
            self._requests.wait_for_work()
        return chunks

    def _save_blocks(self) -> None:
        """Copy blocks to the stores beyond the KV caches: evicted ones before anything overwrites them."""
        if self._offloading is not None:
            self._offloading.save()

    def _copy_blocks(self) -> None:
        """Copy the shared blocks that sequences are about to write into."""
        for group, pairs in enumerate(self._block_manager.pending_copies):
            if pairs:
                for worker in self._workers:
                    worker.copy_blocks(pairs, group)
                pairs.clear()

    def _choose_rows(self, chunks: list[Chunk]) -> tuple[list[Chunk], list[LogitsRow]]:
        """Return the chunks to compute and their rows of logits.

        Requests whose grammar fails at this point end here, and their chunks are left out.
        """
        rows: list[LogitsRow] = []
        errors: dict[str, Exception] = {}
        for chunk in chunks:
            try:
                if chunk.sequence.grammar is not None:
                    for sequence in (chunk.sequence, *chunk.sequence.siblings):
                        sequence.restore_grammar()
                    drop_impossible_drafts(chunk)
                rows += logits_rows(chunk)
            except Exception as error:  # any error ends this request alone
                errors[chunk.sequence.request_id] = error
        if errors:
            for request_id, failure in errors.items():
                self._requests.fail(self._requests.active[request_id], failure)
            # None are left if a request could only be ended by a repair.
            chunks = [chunk for chunk in chunks if chunk.sequence.state is SequenceState.RUNNING]
            kept = {chunk.sequence.request_id for chunk in chunks}
            rows = [row for row in rows if row.sequence.request_id in kept]
        return chunks, rows

    def _collect(self, launched: Launched) -> StepStats:
        """Wait for the results of a step and pass them to the requests."""
        chunks, tokens = launched.chunks, launched.draw.tokens()
        if self._speculator is not None:
            self._speculator.record_seconds(chunks, time.perf_counter() - launched.start_compute)
        num_generated = self._update(launched, tokens)
        work = StepWork.of(chunks)
        return StepStats(launched.start, time.perf_counter() - launched.start, work, num_generated)

    def _update(self, launched: Launched, tokens: list[SampledToken]) -> int:
        """Pass the results to the requests, each of which is completely updated before the next one.

        Returns:
            The number of tokens that the requests got.
        """
        num_generated = 0
        for request_id, parts in _by_request(launched.chunks, tokens).items():
            request = self._requests.active[request_id]
            try:
                num_generated += self._update_request(request, parts, launched.result)
            except BaseException as error:
                self._requests.discard(request, error)
                break  # the other sequences were queued anew: their results of this step will be computed again
        return num_generated

    def _update_request(self, request: Request, parts: list[_ChunkResult], result: StepResult) -> int:
        """Update a request with the results of its sequences, and report it if it has a new token or has ended.

        Returns:
            The number of its new tokens.
        """
        has_news, before = False, request.num_generated_tokens
        for chunk, tokens in parts:
            has_news |= chunk.is_last
            self._update_sequences(request, self._advance(chunk, tokens), chunk, result.hidden)
        request.end_step(self._scheduler)
        if has_news or not request.unfinished:
            self._requests.report(request)
        return request.num_generated_tokens - before

    def _advance(self, chunk: Chunk, tokens: list[SampledToken]) -> list[SequenceStep]:
        """Mark a chunk's accepted drafts as computed, and fork the siblings once the prompt is complete.

        Returns:
            The results for the chunk's sequence and for each sibling, in this order.
        """
        sequence, accepted = chunk.sequence, 0
        if chunk.num_receivers:
            sequence.num_unknown_tokens -= 1
        if chunk.drafts:
            accepted = _num_accepted(chunk.drafts, tokens)
            sequence.num_computed_tokens += accepted
            self._block_manager.advance_states(chunk, accepted)
        if self._speculator is not None:
            self._speculator.record_accepted(chunk, accepted)
        start, is_last = chunk.start, chunk.is_last
        if not is_last or not sequence.siblings:
            return [SequenceStep(sequence, start, tokens[: accepted + 1], is_last)]
        siblings, sequence.siblings = sequence.siblings, []
        for sibling in siblings:
            self._scheduler.fork(sequence, sibling)
        return [
            SequenceStep(receiver, start, [token], is_last)
            for receiver, token in zip((sequence, *siblings), tokens, strict=True)
        ]

    def _update_sequences(self, request: Request, steps: list[SequenceStep], chunk: Chunk, hidden: Tensor) -> None:
        """Update a request with the results of a sequence and of those forked from it.

        Args:
            request: the request.
            steps: the results, first that of the sequence.
            chunk: the sequence's chunk.
            hidden: [n, hidden] hidden states of the whole step.
        """
        sequence = chunk.sequence
        try:
            if sequence.next_prompt_logprob is not None or sequence.pooling is not None:
                steps[0] = self._with_prompt_results(steps[0], hidden[chunk.hidden_rows])
            for step in steps:
                _update_until_error(request, step)
        except Exception as error:
            request.finish("error", describe_error(error))
        else:
            self._block_manager.end_step(sequence)  # after the accepted tokens were appended

    def _with_prompt_results(self, step: SequenceStep, hidden: Tensor) -> SequenceStep:
        """Add what a request wants of its prompt beside its keys and values.

        Args:
            step: the results of a sequence.
            hidden: [n, hidden] hidden states of its chunk: of all tokens for log-probabilities and the mean, otherwise
                at least of the last one.
        """
        sequence, start = step.sequence, step.start
        if sequence.next_prompt_logprob is not None:
            count = sequence.params.prompt_logprobs
            assert count is not None
            # The hidden state of a token belongs to the log-probabilities of the next one.
            first = max(sequence.next_prompt_logprob, start + 1)
            end = min(start + 1 + len(hidden), sequence.num_prompt_tokens)
            if first < end:
                before = hidden[first - 1 - start : end - 1 - start]
                logprobs = self._worker.prompt_logprobs(before, sequence.token_ids[first:end], count, sequence.adapter)
                return step._replace(prompt_logprobs=logprobs)
        if sequence.pooling == "mean":
            return step._replace(pooled=self._worker.sum_hidden(hidden))
        if sequence.pooling == "last" and step.is_last:
            return step._replace(pooled=self._worker.sum_hidden(hidden[-1:]))
        return step


def _num_accepted(drafts: list[int], tokens: list[SampledToken]) -> int:
    """Return the number of drafts, from the first on, that equal the drawn tokens."""
    accepted = 0
    for draft, token in zip(drafts, tokens, strict=False):
        if draft != token.token_id:
            break
        accepted += 1
    return accepted


def is_wanted(chunk: Chunk) -> bool:
    """Return whether a launched chunk's sequence has neither ended nor been restarted since."""
    sequence = chunk.sequence
    return sequence.state is not SequenceState.FINISHED and sequence.num_restarts == chunk.num_restarts


def _update_until_error(request: Request, step: SequenceStep) -> None:
    """Update a request with the tokens before the first one that could not be drawn.

    Raises:
        Exception: why that one could not be drawn, if the tokens before it do not end the text. (With drafts several
            tokens are drawn at once; without them the faulty one might never be drawn.)
    """
    for index, token in enumerate(step.tokens):
        if token.error is not None:
            request.update(step._replace(tokens=step.tokens[:index]))
            if step.sequence in request.unfinished:
                raise token.error
            return
    request.update(step)


def _by_request(chunks: list[Chunk], tokens: list[SampledToken]) -> dict[str, list[_ChunkResult]]:
    """Divide a step's drawn tokens among its chunks, by request.

    Results that nobody wants are left out.
    """
    results: dict[str, list[_ChunkResult]] = {}
    end_drawn = 0
    for chunk in chunks:
        first_drawn = end_drawn
        end_drawn += chunk.num_receivers + len(chunk.drafts)
        if is_wanted(chunk):
            part = chunk, tokens[first_drawn:end_drawn]
            results.setdefault(chunk.sequence.request_id, []).append(part)
    return results
