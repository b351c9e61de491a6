"""Runs many requests at the same time: every step is schedule, run, sample, update."""

import itertools
import secrets
import time
from collections.abc import Iterable
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from fastinfer import ops
from fastinfer.engine.adapters import Adapters
from fastinfer.engine.batch_inputs import BatchInputs, StepResult, num_rows
from fastinfer.engine.beam_request import BeamRequest
from fastinfer.engine.block_manager import BlockManager
from fastinfer.engine.config import EngineConfig
from fastinfer.engine.draft_model import DraftModelSpeculator
from fastinfer.engine.generation_request import GenerationRequest
from fastinfer.engine.grammar import Grammar, GrammarCompiler
from fastinfer.engine.kv_cache_size import choose_num_blocks
from fastinfer.engine.prefill_request import EmbeddingRequest, PrefillRequest
from fastinfer.engine.prompt_modules import PromptModule, PromptModules
from fastinfer.engine.request import Output, Request, SequenceStep
from fastinfer.engine.runner import Runner
from fastinfer.engine.sampler import Row, SampledToken, Sampler, rows_of
from fastinfer.engine.scheduler import Chunk, Scheduler
from fastinfer.engine.sequence import Sequence, SequenceState
from fastinfer.engine.speculation import NgramSpeculator, Speculator
from fastinfer.engine.stats import EngineStats
from fastinfer.engine.token_counts import TokenCounts
from fastinfer.errors import QueueFullError, RequestError, reason
from fastinfer.models import Model
from fastinfer.models.kv_cache import KVCache, num_blocks_for, token_bytes
from fastinfer.models.lora import AdapterSlots
from fastinfer.sampling_params import BeamSearchParams, SamplingParams
from fastinfer.tokenizers.tokenizer import Tokenizer
from fastinfer.utils.checks import INT64_MAX, check_int

POOLINGS = ("last", "mean")
# How long a step waits where nothing can be computed yet: for a grammar's compiler, or for a batch to fill.
IDLE_WAIT_S = 0.001


class Engine:
    """Owns the cache and the queues. Not thread-safe: one thread at a time may call it.

    Errors: what goes wrong in one request's own processing (its draw, its text, its grammar) ends that request with the
    finish reason ``"error"``. If the model fails, :meth:`step` raises and no request has moved: the caller aborts them,
    or steps again.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        config: EngineConfig | None = None,
        draft_model: Model | None = None,
    ) -> None:
        self.config = config = config or EngineConfig()
        self.model = model
        self.adapters = Adapters()
        if config.max_loras:
            slots = AdapterSlots(model.config, config.max_loras, config.max_lora_rank, config.lora_dtype, config.device)
            self.adapters = Adapters(slots)
            self.model = model.with_adapters(slots)
        self.tokenizer = tokenizer
        self.max_model_len = config.max_model_len or model.config.max_position
        if self.max_model_len > model.config.max_position:
            raise RequestError(
                f"max_model_len must be at most the model's {model.config.max_position}, got {self.max_model_len}"
            )
        sizes = [model.config] if draft_model is None else [model.config, draft_model.config]
        tokens = [token_bytes(s.num_layers, s.num_kv_heads, s.head_dim, config.kv_cache_dtype) for s in sizes]
        num_blocks = choose_num_blocks(config, sum(tokens), self.max_model_len)
        self.block_manager = BlockManager(num_blocks, config.block_size, config.enable_prefix_caching)
        self.kv_cache = self._make_tensors(model)
        self.draft_kv_cache: KVCache | None = None
        self.scheduler = Scheduler(
            self.block_manager, config.max_num_seqs, config.max_num_batched_tokens, config.make_admission_policy()
        )
        self.sampler = self._make_sampler()
        with self._numerics():  # graphs are captured
            self.runner = self._make_runner(self.model, self.kv_cache, with_adapters=config.max_loras > 0)
            self.speculator = self._make_speculator(draft_model)
        self.grammars = GrammarCompiler(tokenizer, model.config.vocab_size)
        self.prompt_modules = PromptModules(self.block_manager, self.max_model_len)
        self._compiling: dict[str, Future[Grammar]] = {}
        self._requests: dict[str, Request] = {}
        self._undelivered: dict[str, Output] = {}  # last outputs that no step has returned yet
        self._numbers = itertools.count()

    def validate(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams | None = None,
        adapter: str | None = None,
        *,
        generates: bool = True,
    ) -> None:
        """Raise RequestError if the request can never be served."""
        if not isinstance(prompt_token_ids, list):
            raise RequestError(f"prompt_token_ids must be a list, got {type(prompt_token_ids).__name__}")
        if not prompt_token_ids:
            raise RequestError("prompt must have at least 1 token, got 0")
        if len(prompt_token_ids) + generates > self.max_model_len:  # at least one token is generated
            limit = "shorter than" if generates else "at most"
            raise RequestError(
                f"prompt must be {limit} max_model_len={self.max_model_len} tokens, got {len(prompt_token_ids)}"
            )
        if adapter is not None:
            self.adapters.slot(adapter)
        vocab_size = self.model.config.vocab_size
        for token_id in prompt_token_ids:
            check_int("prompt_token_ids", token_id, 0, vocab_size - 1)
        if params is None:
            return
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params must be SamplingParams, got {type(params).__name__}")
        check_int("n", params.n, 1, self.config.max_num_seqs)
        for name in ("logit_bias", "stop_token_ids"):
            for token_id in getattr(params, name):
                check_int(name, token_id, 0, vocab_size - 1)

    def validate_beam_search(
        self, prompt_token_ids: list[int], params: BeamSearchParams, adapter: str | None = None
    ) -> None:
        """Raise RequestError if the search can never be served."""
        self.validate(prompt_token_ids, adapter=adapter)
        if not isinstance(params, BeamSearchParams):
            raise RequestError(f"params must be BeamSearchParams, got {type(params).__name__}")
        check_int("beam_width", params.beam_width, 1, self.config.max_num_seqs)

    def add_request(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams | None = None,
        *,
        prompt: str | None = None,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        adapter: str | None = None,
    ) -> str:
        """Queue a request and return its id; the next steps work on it.

        Args:
            prompt_token_ids: ids within the model's vocabulary.
            params: defaults to ``SamplingParams()``.
            prompt: the prompt as text, handed through to the outputs.
            request_id: must not be that of an unfinished request; by default a number is given.
            priority: requests with smaller numbers are served first, among equals the older one.
            cache_salt: prefixes are shared only among requests of the same salt, a tenant's name for instance.
            adapter: name of the LoRA adapter to compute it with, see :meth:`load_adapter`.

        Raises:
            QueueFullError: ``max_num_waiting`` requests wait.
            RequestError: the request can never be served, or its id is taken.
        """
        params = params or SamplingParams()
        self.validate(prompt_token_ids, params, adapter)
        request_id = self._new_id(request_id)
        identity = self._identity(priority, cache_salt, adapter)
        max_length = self.max_model_len
        if params.max_tokens is not None:
            max_length = min(max_length, len(prompt_token_ids) + params.max_tokens)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        sequences = [
            Sequence(
                request_id,
                prompt_token_ids,
                params,
                (seed + index) % (INT64_MAX + 1),
                max_length=max_length,
                **identity,
                reads_prefix=params.prompt_logprobs is None,  # the cache holds no logits
            )
            for index in range(params.n)
        ]
        sequences[0].siblings = sequences[1:]
        if params.has_penalties:
            counts = TokenCounts(prompt_token_ids, self.model.config.vocab_size)
            for sequence in sequences:
                sequence.counts = counts.copy()
        self._requests[request_id] = GenerationRequest(sequences, prompt, self.tokenizer)
        if params.structured_outputs is None:
            self.scheduler.add(sequences[0])
        else:
            self._compiling[request_id] = self.grammars.submit(params.structured_outputs)
        return request_id

    def add_beam_request(
        self,
        prompt_token_ids: list[int],
        params: BeamSearchParams,
        *,
        prompt: str | None = None,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        adapter: str | None = None,
    ) -> str:
        """Queue a prompt whose likeliest continuations are searched; there is one output, at the end.

        Args:
            prompt_token_ids: ids within the model's vocabulary.
            params: how to search.
            prompt, request_id, priority, cache_salt, adapter: as for :meth:`add_request`.

        Raises:
            QueueFullError, RequestError: as :meth:`add_request`.
        """
        self.validate_beam_search(prompt_token_ids, params, adapter)
        request_id = self._new_id(request_id)
        identity = self._identity(priority, cache_salt, adapter)
        greedy = SamplingParams(temperature=0.0, max_tokens=params.max_tokens, logprobs=2 * params.beam_width)
        max_length = min(self.max_model_len, len(prompt_token_ids) + params.max_tokens)
        first = Sequence(request_id, prompt_token_ids, greedy, 0, max_length=max_length, **identity)
        first.may_speculate = False
        first.siblings = [first.copy() for _ in range(params.beam_width - 1)]
        request = BeamRequest([first, *first.siblings], params, prompt, self.tokenizer)
        self._requests[request_id] = request
        self.scheduler.add(first)
        return request_id

    def add_embedding_request(
        self,
        prompt_token_ids: list[int],
        *,
        pooling: str = "mean",
        normalize: bool = True,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        adapter: str | None = None,
    ) -> str:
        """Queue a prompt whose hidden states are wanted as one vector.

        Args:
            prompt_token_ids: ids within the model's vocabulary.
            pooling: ``"mean"`` over all tokens, or the ``"last"`` token.
            normalize: scale the vector to length 1.
            request_id, priority, cache_salt, adapter: as for :meth:`add_request`.

        Raises:
            QueueFullError, RequestError: as :meth:`add_request`.
        """
        self.validate(prompt_token_ids, adapter=adapter, generates=False)
        if pooling not in POOLINGS:
            raise RequestError(f"pooling must be one of {', '.join(POOLINGS)}, got {pooling!r}")
        identity = self._identity(priority, cache_salt, adapter)
        sequence = self._prefill_sequence(prompt_token_ids, request_id, reads_prefix=pooling == "last", **identity)
        return self._add_prefill(EmbeddingRequest(sequence, pooling, normalize))

    def add_prompt_module(
        self, name: str, prompt_token_ids: list[int], *, cache_salt: str = "", adapter: str | None = None
    ) -> str:
        """Queue a prompt that stays in the cache until :meth:`remove_prompt_module`, for others to begin with.

        Args:
            name: for :meth:`prompt_module`.
            prompt_token_ids: ids within the model's vocabulary.
            cache_salt, adapter: of the requests that may find it, see :meth:`add_request`.

        Returns:
            The id of the request that computes it; its blocks are shared as soon as they are full.

        Raises:
            QueueFullError, RequestError: as :meth:`add_request`; or the name is taken, or prefixes are not cached, or
                with this module the cache could not hold a sequence of the greatest length any more.
        """
        self.validate(prompt_token_ids, adapter=adapter)
        sequence = self._prefill_sequence(prompt_token_ids, None, **self._identity(0, cache_salt, adapter))
        self.prompt_modules.add(name, PromptModule(sequence, cache_salt))
        return self._add_prefill(PrefillRequest(sequence))

    def remove_prompt_module(self, name: str) -> None:
        """Forget a prompt module; its blocks stay findable until others need the room. If it is not computed yet, its
        request ends with the finish reason ``"abort"``.

        Raises:
            RequestError: there is none of this name.
        """
        sequence = self.prompt_modules.get(name).sequence
        if (output := self.abort(sequence.request_id)) is not None:
            self._undelivered[sequence.request_id] = output  # somebody may wait for it
        self.prompt_modules.forget([sequence])
        self.block_manager.free(sequence)

    def prompt_module(self, name: str) -> PromptModule:
        """What was added under this name.

        Raises:
            RequestError: there is none of this name.
        """
        return self.prompt_modules.get(name)

    def load_adapter(self, name: str, path: str | Path) -> None:
        """Read a LoRA adapter, a folder as PEFT saves it, for requests that name it.

        Raises:
            AdapterError: it cannot be read, or does not fit the model.
            RequestError: the name is taken, or ``max_loras`` are loaded.
        """
        self.adapters.load(name, path)

    def unload_adapter(self, name: str) -> None:
        """Forget a LoRA adapter.

        Raises:
            RequestError: there is none of this name, or an unfinished request or a prompt module uses it.
        """
        unfinished = [s for request in self._requests.values() for s in request.unfinished]
        self.adapters.unload(name, unfinished + self.prompt_modules.sequences)

    @torch.inference_mode()
    def step(self) -> list[Output]:
        """Compute the next tokens, and return the outputs of the requests that got some."""
        with self._numerics():
            return self._step()

    def _step(self) -> list[Output]:
        self._start_compiled()
        outputs: list[Output] = []
        if self.speculator is not None:
            self.speculator.plan(self.scheduler.running)
        chunks = self.scheduler.schedule()
        if chunks:
            self._copy_blocks()
            if self.speculator is not None:
                self.speculator.propose(chunks)
        elif not self._undelivered:
            self._wait()
        chunks, rows = self._prepare(chunks)
        if chunks:
            start = time.perf_counter()
            result = self.runner(chunks)
            tokens = self.sampler.draw(result.logits, rows, result.recorded)
            if self.speculator is not None:
                self.speculator.note_seconds(chunks, time.perf_counter() - start)
            outputs = self._update(chunks, result, tokens)
        outputs += self._undelivered.values()
        self._undelivered.clear()
        return outputs

    def abort(self, request_id: str) -> Output | None:
        """End a request and free its cache at once.

        Returns:
            Its last output, with the finish reason ``"abort"``, unless it has just ended by itself and no step has
            returned that; ``None`` for a request that is unknown or finished.
        """
        request = self._requests.get(request_id)
        if request is None:
            return self._undelivered.pop(request_id, None)
        self._compiling.pop(request_id, None)
        outputs = self._end(request, "abort")
        return outputs[0] if outputs else None

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests or self._undelivered)

    def stats(self) -> EngineStats:
        cache, running = self.block_manager, self.scheduler.running
        slots = sum(len(sequence.blocks) for sequence in running) * cache.block_size
        tokens = sum(sequence.num_computed_tokens for sequence in running)
        return EngineStats(
            num_running=len(running),
            num_waiting=len(self.scheduler.waiting) + len(self._compiling),
            num_free_blocks=cache.num_free,
            num_cached_blocks=cache.num_cached,
            num_used_blocks=cache.num_used,
            num_preemptions=self.scheduler.num_preemptions,
            num_queried_tokens=cache.num_queried_tokens,
            num_hit_tokens=cache.num_hit_tokens,
            kv_fragmentation=1 - tokens / slots if slots else 0.0,
            num_drafted_tokens=self.speculator.num_drafted if self.speculator else 0,
            num_accepted_tokens=self.speculator.num_accepted if self.speculator else 0,
        )

    def _numerics(self) -> AbstractContextManager[None]:
        return ops.batch_invariant() if self.config.deterministic else nullcontext()

    def _copy_blocks(self) -> None:
        """Give their own copy of a block to those who are about to write into a shared one."""
        if self.block_manager.copies:
            for tensors in (self.kv_cache, self.draft_kv_cache):
                if tensors is not None:
                    tensors.copy_blocks(self.block_manager.copies)
            self.block_manager.copies.clear()

    def _prepare(self, chunks: list[Chunk]) -> tuple[list[Chunk], list[Row]]:
        """The chunks to compute and their rows of logits; ends the requests whose grammar fails."""
        rows: dict[int, list[Row]] = {}
        errors: dict[str, Exception] = {}
        for index, chunk in enumerate(chunks):
            try:
                rows[index] = rows_of(chunk)
            except Exception as error:  # whatever it is, the others live on
                errors[chunk.sequence.request_id] = error
        kept = [index for index, chunk in enumerate(chunks) if chunk.sequence.request_id not in errors]
        for request_id, failure in errors.items():
            self._fail(request_id, failure)
        return [chunks[index] for index in kept], [row for index in kept for row in rows[index]]

    def _update(self, chunks: list[Chunk], result: StepResult, tokens: list[SampledToken]) -> list[Output]:
        """Note what was computed, hand out the tokens, and end what has ended."""
        touched: dict[str, Request] = {}
        to_report: dict[str, Request] = {}
        drawn = iter(tokens)
        end = 0
        for chunk in chunks:
            sequence = chunk.sequence
            start, end = end, end + chunk.num_tokens + len(chunk.drafts)
            its_tokens = [next(drawn) for _ in range(num_rows(chunk))]
            first, is_last, accepted = sequence.num_computed_tokens, chunk.is_last, _num_accepted(chunk, its_tokens)
            sequence.num_computed_tokens += chunk.num_tokens + accepted
            if self.speculator is not None:
                self.speculator.accept(chunk, accepted)
            siblings, sequence.siblings = (sequence.siblings, []) if is_last else ([], sequence.siblings)
            for child in siblings:
                self.scheduler.fork(sequence, child)

            request = touched[sequence.request_id] = self._requests[sequence.request_id]
            where = result.hidden, slice(start, end)
            own, others = its_tokens[: accepted + 1], its_tokens[1 : len(siblings) + 1]
            try:
                for token in (*own, *others):
                    if token.error is not None:
                        raise token.error
                request.take(SequenceStep(self.model, sequence, first, *where, own, is_last))
                for child, token in zip(siblings, others, strict=True):
                    request.take(SequenceStep(self.model, child, first, *where, [token], is_last))
            except Exception as error:  # whatever it is, the others live on
                request.finish("error", reason(error))
            else:
                self.block_manager.commit(sequence)  # only now it has the tokens that were accepted
            if is_last or not request.unfinished:
                to_report[request.request_id] = request
        for request in touched.values():
            request.settle(self.scheduler)
        return self._report(to_report.values())

    def _report(self, requests: Iterable[Request]) -> list[Output]:
        """The requests' outputs; what of them has ended leaves the scheduler."""
        outputs = []
        for request in requests:
            unfinished = request.unfinished
            for sequence in request.sequences:
                if sequence.state is not SequenceState.FINISHED and sequence not in unfinished:
                    is_module = self.prompt_modules.holds(sequence)
                    if is_module:
                        self.block_manager.publish(sequence)  # others' blocks may go, these are pinned
                    self.scheduler.finish(sequence, keep_blocks=is_module)
            if not unfinished:
                del self._requests[request.request_id]
            output = request.output()
            if output is not None:
                outputs.append(output)
        return outputs

    def _end(self, request: Request, reason: str, stop_reason: str | None = None) -> list[Output]:
        request.finish(reason, stop_reason)
        self.prompt_modules.forget(request.sequences)
        return self._report([request])

    def _fail(self, request_id: str, error: Exception) -> None:
        """End a request within a step, which may yet raise: then the next one returns the output."""
        for output in self._end(self._requests[request_id], "error", reason(error)):
            self._undelivered[request_id] = output

    def _start_compiled(self) -> None:
        """Queue the requests whose grammar has been compiled, and end those where that failed."""
        for request_id in [name for name, future in self._compiling.items() if future.done()]:
            request, future = self._requests[request_id], self._compiling.pop(request_id)
            first = request.sequences[0]
            try:
                grammar = future.result()
                for sequence in request.sequences:
                    sequence.grammar = grammar.copy()
            except Exception as error:
                self._fail(request_id, error)
            else:
                self.scheduler.add(first)

    def _wait(self) -> None:
        """Nothing can be computed yet."""
        if self._compiling:
            wait(self._compiling.values(), timeout=IDLE_WAIT_S)
        elif self.scheduler.waiting:
            time.sleep(IDLE_WAIT_S)

    def _new_id(self, request_id: str | None) -> str:
        num_waiting = len(self.scheduler.waiting) + len(self._compiling)
        if num_waiting >= self.config.max_num_waiting:
            raise QueueFullError(f"the queue is full: max_num_waiting={self.config.max_num_waiting} requests wait")
        if request_id is None:
            numbered = (f"request-{number}" for number in self._numbers)
            return next(name for name in numbered if name not in self._requests)  # a user may have chosen one of them
        if request_id in self._requests or request_id in self._undelivered:
            raise RequestError(f"request_id must be new, got {request_id!r}, which is still running")
        return request_id

    def _identity(self, priority: int, cache_salt: str, adapter: str | None) -> dict[str, Any]:
        """A sequence's arguments that say whose it is."""
        check_int("priority", priority, -INT64_MAX, INT64_MAX)
        return {
            "priority": priority,
            "cache_salt": cache_salt,
            "adapter": -1 if adapter is None else self.adapters.slot(adapter),
            "adapter_key": "" if adapter is None else self.adapters.cache_key(adapter),
        }

    def _prefill_sequence(self, prompt_token_ids: list[int], request_id: str | None, **options: Any) -> Sequence:
        return Sequence(self._new_id(request_id), prompt_token_ids, SamplingParams(), 0, samples=False, **options)

    def _add_prefill(self, request: PrefillRequest) -> str:
        self._requests[request.request_id] = request
        self.scheduler.add(request.sequences[0])
        return request.request_id

    def _make_tensors(self, model: Model) -> KVCache:
        return KVCache.empty(
            model.config.num_layers,
            self.block_manager.num_blocks,
            self.config.block_size,
            model.config.num_kv_heads,
            model.config.head_dim,
            self.config.kv_cache_dtype,
            self.config.device,
        )

    def _make_sampler(self) -> Sampler:
        return Sampler(self._max_rows, self.model.config.vocab_size, self.tokenizer.eos_ids)

    def _make_runner(self, model: Model, kv_cache: KVCache, *, with_adapters: bool = False) -> Runner:
        config = self.config
        inputs = BatchInputs(
            # Padding takes a sequence for each token of a step that decodes.
            max_seqs=config.max_num_seqs * (1 + config.num_speculative_tokens),
            max_tokens=config.max_num_batched_tokens,
            max_logits=self._max_rows,
            max_blocks=num_blocks_for(self.max_model_len, config.block_size),
            block_size=config.block_size,
            device=config.device,
        )
        return Runner(
            model,
            kv_cache,
            inputs,
            enforce_eager=config.enforce_eager,
            with_adapters=with_adapters,
            deterministic=config.deterministic,
        )

    def _make_speculator(self, draft_model: Model | None) -> Speculator | None:
        max_drafts = self.config.num_speculative_tokens
        if draft_model is None:
            return NgramSpeculator(max_drafts) if max_drafts else None
        if not max_drafts:
            raise RequestError("a draft model needs num_speculative_tokens of at least 1, got 0")
        sizes, theirs = self.model.config, draft_model.config
        if theirs.vocab_size != sizes.vocab_size or theirs.max_position < self.max_model_len:
            raise RequestError(
                f"the draft model must have the vocabulary of {sizes.vocab_size} tokens and a context of at least "
                f"{self.max_model_len}, got {theirs.vocab_size} and {theirs.max_position}"
            )
        self.draft_kv_cache = self._make_tensors(draft_model)
        runner = self._make_runner(draft_model, self.draft_kv_cache)
        return DraftModelSpeculator(runner, self._make_sampler(), max_drafts, self.config.max_num_batched_tokens)

    @property
    def _max_rows(self) -> int:
        """Of logits in a step."""
        return self.config.max_num_seqs + self.config.max_num_batched_tokens


def _num_accepted(chunk: Chunk, tokens: list[SampledToken]) -> int:
    """How many of the drafts are what was drawn."""
    accepted = 0
    for draft, token in zip(chunk.drafts, tokens, strict=False):
        if draft != token.token_id:
            break
        accepted += 1
    return accepted
