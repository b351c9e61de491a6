"""The engine, which computes many requests at the same time."""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from fastinfer import ops
from fastinfer.engine.adapters import Adapters
from fastinfer.engine.beam_request import BeamRequest
from fastinfer.engine.block_manager import BlockManager
from fastinfer.engine.config import EngineConfig
from fastinfer.engine.construction import (
    check_draft_model,
    kv_cache_size,
    make_draft_speculator,
    make_kv_cache,
    make_ngram_speculator,
    make_offloading,
    make_runner,
    make_sampler,
)
from fastinfer.engine.generation_request import GenerationRequest
from fastinfer.engine.grammar import GrammarCompiler
from fastinfer.engine.prefill_request import EmbeddingRequest, PrefillRequest
from fastinfer.engine.prompt_modules import PromptModule, PromptModules
from fastinfer.engine.request import Output
from fastinfer.engine.request_table import RequestTable
from fastinfer.engine.request_validator import RequestValidator, ValidPrompt
from fastinfer.engine.scheduler import Scheduler
from fastinfer.engine.speculation import Speculator
from fastinfer.engine.stats import EngineStats, StepStats, StepTotals
from fastinfer.engine.step import Step
from fastinfer.formats.peft import LoraAdapter
from fastinfer.models import Model
from fastinfer.models.kv_cache import KVCache
from fastinfer.models.lora import AdapterSlots
from fastinfer.sampling_params import DEFAULT_PARAMS, BeamSearchParams, SamplingParams
from fastinfer.tokenizers.tokenizer import Tokenizer

LOG = logging.getLogger("fastinfer")


class Engine:
    """Computes many requests at the same time, with one model and one KV cache.

    The engine is not thread-safe: only one thread at a time may call it.

    An error within one request (in its draw, its text, its grammar or its outputs) ends that request with the finish
    reason ``"error"``. If the model or the scheduler fails, :meth:`step` raises and no request has lost or gained a
    token: the caller may abort them or call :meth:`step` again.

    Args:
        model: model that computes the logits.
        tokenizer: tokenizer of the model.
        config: limits and options; ``EngineConfig()`` by default.
        draft_model: smaller model with the same vocabulary that drafts tokens for speculative decoding.
        default_params: sampling parameters of requests that give none.
        fingerprint: identity of the weights and the precision of the models, see
            :func:`fastinfer.models.fingerprint.fingerprint`; only needed to keep the KV cache on disk.

    Attributes:
        config: limits and options.
        tokenizer: tokenizer of the model.
        default_params: sampling parameters of requests that give none.
        model: model that computes the logits, with slots for LoRA adapters if ``config`` has any.
        adapters: the loaded LoRA adapters.
        max_model_len: longest sequence in tokens.
        block_manager: manager of the blocks of the KV caches.
        kv_cache, draft_kv_cache: KV caches of the model and of the draft model, which is ``None`` without one.
        offloading: stores of blocks in host memory and on disk; ``None`` without any.
        scheduler: scheduler, which chooses what each step computes.
        sampler: sampler of the next tokens.
        runner: runner of the model.
        speculator: source of draft tokens; ``None`` without speculation.
        grammars: compiler of grammars for structured outputs.
        prompt_modules: the prompt modules by name.
        requests: the unfinished requests.
        on_step: function that is called after each step, in the same thread; ``None`` for none.

    Raises:
        RequestError: the configuration does not fit the models or the memory.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        config: EngineConfig | None = None,
        draft_model: Model | None = None,
        default_params: SamplingParams = DEFAULT_PARAMS,
        fingerprint: str = "",
    ) -> None:
        self.config = config = config or EngineConfig()
        self.tokenizer = tokenizer
        self.default_params = default_params
        self.model, self.adapters = _with_adapters(model, config)
        models = [model.config] if draft_model is None else [model.config, draft_model.config]
        size = kv_cache_size(config, models)
        self.max_model_len = size.max_model_len
        self.kv_cache = make_kv_cache(config, model, size.num_blocks)
        self.draft_kv_cache: KVCache | None = None
        if draft_model is not None:
            check_draft_model(config, model.config, draft_model.config, self.max_model_len)
            self.draft_kv_cache = make_kv_cache(config, draft_model, size.num_blocks)
        kv_caches = [cache for cache in (self.kv_cache, self.draft_kv_cache) if cache is not None]
        self.offloading = make_offloading(config, models, kv_caches, fingerprint)
        self.block_manager = BlockManager(
            size.num_blocks, config.block_size, config.enable_prefix_caching, self.offloading
        )
        self.scheduler = Scheduler(
            self.block_manager, config.max_num_seqs, config.max_num_batched_tokens, config.make_admission_policy()
        )
        self.sampler = make_sampler(config, model, tokenizer)
        self._samplers = [self.sampler]
        with self._numerics():  # on a GPU the runners capture their graphs here
            self.runner = make_runner(
                config, self.model, self.kv_cache, self.max_model_len, with_adapters=config.max_loras > 0
            )
            self._runners = [self.runner]
            self.speculator = self._make_speculator(draft_model)
        self.grammars = GrammarCompiler(tokenizer, model.config.vocab_size)
        self.prompt_modules = PromptModules(self.block_manager, self.max_model_len)
        self.requests = RequestTable(
            self.scheduler,
            self.block_manager,
            self.prompt_modules,
            config.max_num_waiting,
            config.max_num_waiting_tokens,
        )
        self.on_step: Callable[[StepStats], None] | None = None
        self._totals = StepTotals()
        self._validator = RequestValidator(config, self.max_model_len, model.config.vocab_size, self.adapters)
        self._step = Step(
            model=self.model,
            runner=self.runner,
            sampler=self.sampler,
            speculator=self.speculator,
            scheduler=self.scheduler,
            block_manager=self.block_manager,
            kv_caches=kv_caches,
            offloading=self.offloading,
            requests=self.requests,
            runs_ahead=config.runs_ahead,
        )

    def validate(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams | None = None,
        adapter: str | None = None,
        *,
        generates: bool = True,
    ) -> ValidPrompt:
        """Check a request without queueing it.

        Args:
            prompt_token_ids: token ids of the prompt.
            params: sampling parameters; ``None`` to check none.
            adapter: name of a LoRA adapter.
            generates: whether there must be room for at least one generated token.

        Returns:
            The prompt in a form that the methods that queue a request accept without checking it again.

        Raises:
            RequestError: the request can never be served.
        """
        if params is not None:
            self._validator.check_sampling_params(params)
        prompt = self._validator.check_prompt(self._validator.truncate(prompt_token_ids, params), generates=generates)
        self._validator.check_adapter(adapter)
        return prompt

    def validate_beam_search(
        self, prompt_token_ids: list[int], params: BeamSearchParams, adapter: str | None = None
    ) -> ValidPrompt:
        """Check a beam search without queueing it; returns and raises the same as :meth:`validate`."""
        prompt = self.validate(prompt_token_ids, adapter=adapter)
        self._validator.check_beam_search_params(params)
        return prompt

    def add_request(
        self,
        prompt_token_ids: list[int] | ValidPrompt,
        params: SamplingParams | None = None,
        *,
        prompt: str | None = None,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        adapter: str | None = None,
        timeout: float | None = None,
        queue_timeout: float | None = None,
    ) -> str:
        """Queue a request and return its id; the next calls of :meth:`step` compute it.

        Args:
            prompt_token_ids: token ids of the prompt, or the prompt that :meth:`validate` returned.
            params: sampling parameters; ``default_params`` if ``None``.
            prompt: the prompt as text, for the outputs.
            request_id: id that no unfinished request has; a generated one by default.
            priority: requests with smaller numbers are served first; equal ones in the order of their arrival, but so
                that short prompts need not wait for long ones, see :class:`fastinfer.engine.scheduler.Scheduler`.
            cache_salt: name of a group, such as a tenant; only requests with the same salt share cached prefixes.
            adapter: name of a LoRA adapter to apply, see :meth:`load_adapter`.
            timeout: seconds in which the request must end; otherwise the next step ends it with the finish reason
                ``"timeout"``. ``None`` for no limit.
            queue_timeout: seconds in which its first tokens must be computed; otherwise it ends in the same way.

        Raises:
            QueueFullError: too many requests or tokens are waiting already.
            RequestError: the request can never be served, or its id is in use.
        """
        params = params or self.default_params
        self._validator.check_sampling_params(params)
        token_ids = self._validator.check_prompt(self._validator.truncate(prompt_token_ids, params)).token_ids
        self._validator.check_timeouts(timeout, queue_timeout)
        request = GenerationRequest(
            self.requests.new_id(request_id, len(token_ids)),
            token_ids,
            params,
            self._validator.sequence_options(priority, cache_salt, adapter),
            prompt=prompt,
            tokenizer=self.tokenizer,
            max_model_len=self.max_model_len,
            vocab_size=self.model.config.vocab_size,
        )
        constraint = params.structured_outputs
        grammar = None if constraint is None else self.grammars.submit(constraint)
        return self.requests.add(request, grammar, timeout, queue_timeout)

    def add_beam_request(
        self,
        prompt_token_ids: list[int] | ValidPrompt,
        params: BeamSearchParams,
        *,
        prompt: str | None = None,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        adapter: str | None = None,
        timeout: float | None = None,
        queue_timeout: float | None = None,
    ) -> str:
        """Queue a beam search for the likeliest continuations of a prompt; its only output comes at the end.

        Args:
            prompt_token_ids: token ids of the prompt, or the prompt that :meth:`validate_beam_search` returned.
            params: parameters of the search.
            prompt, request_id, priority, cache_salt, adapter, timeout, queue_timeout: same as for :meth:`add_request`.

        Raises:
            QueueFullError, RequestError: same as for :meth:`add_request`.
        """
        token_ids = self._validator.check_prompt(prompt_token_ids).token_ids
        self._validator.check_beam_search_params(params)
        self._validator.check_timeouts(timeout, queue_timeout)
        request = BeamRequest(
            self.requests.new_id(request_id, len(token_ids)),
            token_ids,
            params,
            self._validator.sequence_options(priority, cache_salt, adapter),
            prompt=prompt,
            tokenizer=self.tokenizer,
            max_model_len=self.max_model_len,
        )
        return self.requests.add(request, None, timeout, queue_timeout)

    def add_embedding_request(
        self,
        prompt_token_ids: list[int] | ValidPrompt,
        *,
        pooling: str = "mean",
        normalize: bool = True,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        adapter: str | None = None,
        timeout: float | None = None,
        queue_timeout: float | None = None,
    ) -> str:
        """Queue a prompt whose hidden states are returned as one vector.

        Args:
            prompt_token_ids: token ids of the prompt, or the prompt that :meth:`validate` returned.
            pooling: ``"mean"`` for the mean over all tokens, ``"last"`` for the last token alone.
            normalize: whether to scale the vector to length 1.
            request_id, priority, cache_salt, adapter, timeout, queue_timeout: same as for :meth:`add_request`.

        Raises:
            QueueFullError, RequestError: same as for :meth:`add_request`.
        """
        token_ids = self._validator.check_prompt(prompt_token_ids, generates=False).token_ids
        self._validator.check_pooling(pooling)
        self._validator.check_timeouts(timeout, queue_timeout)
        options = self._validator.sequence_options(priority, cache_salt, adapter)
        request = EmbeddingRequest(
            self.requests.new_id(request_id, len(token_ids)), token_ids, options, pooling=pooling, normalize=normalize
        )
        return self.requests.add(request, None, timeout, queue_timeout)

    def add_prompt_module(
        self,
        name: str,
        prompt_token_ids: list[int] | ValidPrompt,
        *,
        cache_salt: str = "",
        adapter: str | None = None,
    ) -> str:
        """Queue a prompt module: a common beginning of prompts that stays in the cache until it is removed.

        Args:
            name: name for :meth:`prompt_module` and :meth:`remove_prompt_module`.
            prompt_token_ids: token ids of the module, or the prompt that :meth:`validate` returned.
            cache_salt, adapter: values that requests must have to share the module, see :meth:`add_request`.

        Returns:
            The id of the request that computes the module; its blocks are shared as soon as they are full.

        Raises:
            QueueFullError: same as for :meth:`add_request`.
            RequestError: same as for :meth:`add_request`; also if the name is in use, if prefix caching is off, or if
                the cache could no longer hold a sequence of the maximum length beside the module.
        """
        token_ids = self._validator.check_prompt(prompt_token_ids).token_ids
        request = PrefillRequest(
            self.requests.new_id(None, len(token_ids)),
            token_ids,
            self._validator.sequence_options(0, cache_salt, adapter),
        )
        self.prompt_modules.add(name, PromptModule(request.sequences[0], cache_salt))
        return self.requests.add(request)

    def remove_prompt_module(self, name: str) -> None:
        """Remove a prompt module; its blocks stay in the prefix cache until they are reused.

        If the module is still being computed, its request ends with the finish reason ``"abort"``.

        Raises:
            RequestError: there is no prompt module of this name.
        """
        sequence = self.prompt_modules.get(name).sequence
        if (output := self.abort(sequence.request_id)) is not None:
            self.requests.deliver_later(output)  # a caller may be waiting for this output
        self.prompt_modules.forget([sequence])
        self.block_manager.free(sequence)

    def prompt_module(self, name: str) -> PromptModule:
        """Return the prompt module of this name.

        Raises:
            RequestError: there is no prompt module of this name.
        """
        return self.prompt_modules.get(name)

    def load_adapter(self, name: str, adapter: str | Path | LoraAdapter) -> None:
        """Load a LoRA adapter for requests that name it.

        Args:
            name: name by which requests refer to the adapter.
            adapter: folder in the format that PEFT saves, or the adapter that
                :func:`fastinfer.formats.peft.read_adapter` has read from it, in any thread.

        Raises:
            AdapterError: the adapter cannot be read, or does not fit the model.
            RequestError: the name is in use, or ``max_loras`` adapters are loaded already.
        """
        self.adapters.load(name, adapter)

    def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter.

        Raises:
            RequestError: there is no adapter of this name, or an unfinished request or a prompt module uses it.
        """
        unfinished = [s for request in self.requests.active.values() for s in request.unfinished]
        self.adapters.unload(name, unfinished + self.prompt_modules.sequences)

    def abort(self, request_id: str, error: BaseException | None = None) -> Output | None:
        """End a request and free its blocks at once.

        Args:
            request_id: id of the request.
            error: error that ends the request; ``None`` if nothing went wrong.

        Returns:
            The request's last output. Its finish reason is ``"abort"``, ``"error"`` if there was one, or the request's
            own if it had ended but no step had returned the output yet. ``None`` if the request is unknown, or its last
            output was returned.
        """
        return self.requests.abort(request_id, error)

    @property
    def has_unfinished(self) -> bool:
        """Whether there is anything for a step to compute or to return."""
        return self.requests.has_unfinished

    def stats(self) -> EngineStats:
        """Return the current load, and counters since the start."""
        manager, scheduler = self.block_manager, self.scheduler
        running = scheduler.running
        slots = sum(len(sequence.blocks) for sequence in running) * manager.block_size
        tokens = sum(sequence.num_computed_tokens for sequence in running)
        return EngineStats(
            num_running=len(running),
            num_waiting=self.requests.num_waiting,
            num_waiting_tokens=self.requests.num_waiting_tokens,
            num_free_blocks=manager.num_free,
            num_cached_blocks=manager.num_cached,
            num_used_blocks=manager.num_used,
            num_preemptions=scheduler.num_preemptions,
            num_overtakings=scheduler.num_overtakings,
            num_postponed_decodes=scheduler.num_postponed_decodes,
            num_cut_drafts=scheduler.num_cut_drafts,
            num_queued_forks=scheduler.num_queued_forks,
            num_queried_tokens=manager.num_queried_tokens,
            num_hit_tokens=manager.num_hit_tokens,
            kv_fragmentation=1 - tokens / slots if slots else 0.0,
            num_drafted_tokens=self.speculator.num_drafted if self.speculator else 0,
            num_accepted_tokens=self.speculator.num_accepted if self.speculator else 0,
            num_eager_steps=sum(runner.num_eager_steps for runner in self._runners),
            num_failed_graphs=sum(len(runner.graphs.failed) for runner in self._runners if runner.graphs is not None),
            num_failed_draws=sum(sampler.num_failed_draws for sampler in self._samplers),
            num_steps=self._totals.num_steps,
            num_prompt_tokens=self._totals.num_prompt_tokens,
            num_generated_tokens=self._totals.num_generated_tokens,
            num_repairs=self.requests.num_repairs,
            num_expired=self.requests.num_expired,
            **({} if self.offloading is None else self.offloading.stats()),
        )

    @torch.inference_mode()
    def step(self) -> list[Output]:
        """Compute the next tokens, and return the outputs of the requests that made progress or ended."""
        with self._numerics():
            stats = self._step()
        if stats is not None:
            self._totals.add(stats)
            self._report(stats)
        return self.requests.pop_undelivered()

    def _report(self, stats: StepStats) -> None:
        """Call the observer of steps; its errors must not end any request."""
        if self.on_step is None:
            return
        try:
            self.on_step(stats)
        except Exception:
            LOG.exception("on_step failed")

    def _numerics(self) -> AbstractContextManager[None]:
        """Return the context in which the model must run."""
        return ops.batch_invariant() if self.config.deterministic else nullcontext()

    def _make_speculator(self, draft_model: Model | None) -> Speculator | None:
        config = self.config
        if draft_model is None:
            return make_ngram_speculator(config)
        assert self.draft_kv_cache is not None
        runner = make_runner(config, draft_model, self.draft_kv_cache, self.max_model_len)
        sampler = make_sampler(config, self.model, self.tokenizer)
        self._runners.append(runner)
        self._samplers.append(sampler)
        return make_draft_speculator(config, runner, sampler)


def _with_adapters(model: Model, config: EngineConfig) -> tuple[Model, Adapters]:
    """Return the model, with slots for LoRA adapters if the configuration has any, and the manager of the slots."""
    if not config.max_loras:
        return model, Adapters()
    slots = AdapterSlots(model.config, config.max_loras, config.max_lora_rank, config.lora_dtype, config.device)
    return model.with_adapters(slots), Adapters(slots)
