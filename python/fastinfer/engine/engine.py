"""The engine, which computes many requests at the same time."""

import logging
import secrets
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fastinfer.engine.adapters import Adapters
from fastinfer.engine.beam_request import BeamRequest
from fastinfer.engine.config import EngineConfig
from fastinfer.engine.construction import (
    check_draft_model,
    fingerprint_of_blocks,
    kv_cache_size,
    make_block_manager,
    make_offloading,
    make_sampler,
    make_speculator,
    modules_obstacle,
)
from fastinfer.engine.generation_request import GenerationRequest
from fastinfer.engine.grammar import Grammar, GrammarCompiler
from fastinfer.engine.kv_cache_size import KVCacheSize
from fastinfer.engine.model_context import model_context
from fastinfer.engine.pinned_prompts import PinnedPrompt, PinnedPrompts
from fastinfer.engine.pipelined_step import PipelinedStep
from fastinfer.engine.prefill_request import EmbeddingRequest, PrefillRequest
from fastinfer.engine.prompt_images import PromptImages
from fastinfer.engine.prompt_layout import PromptLayout
from fastinfer.engine.rank_worker import RankWorker
from fastinfer.engine.request import Output, Request
from fastinfer.engine.request_table import RequestTable
from fastinfer.engine.request_validator import RequestValidator, ValidPrompt
from fastinfer.engine.roles import roles_differ
from fastinfer.engine.scheduler import Scheduler
from fastinfer.engine.sequence import SequenceState
from fastinfer.engine.sleep_mode import LoadModels, SleepMode
from fastinfer.engine.stats import EngineStats, StepStats, StepTotals
from fastinfer.engine.step import Step
from fastinfer.engine.worker import Worker
from fastinfer.errors import RequestError, UnavailableError
from fastinfer.models import Model, check_has_all_logits
from fastinfer.models.decoder import Decoder
from fastinfer.models.draft_head import DraftHead, FeatureWriter
from fastinfer.models.image_encoder import ImageEncoder
from fastinfer.models.lora import AdapterSlots, PreparedAdapter
from fastinfer.models.placed_decoder import PlacedDecoder
from fastinfer.outputs import PrefillOutput
from fastinfer.parallel.ranks import Ranks
from fastinfer.parallel.stage import Stage
from fastinfer.sampling_params import DEFAULT_PARAMS, BeamSearchParams, SamplingParams
from fastinfer.tokenizers.tokenizer import Tokenizer
from fastinfer.utils.forks import renew_in_children
from fastinfer.utils.interrupts import deferred_interrupts

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
        draft_model: smaller model with the same vocabulary, or draft head, that drafts tokens for speculative decoding;
            it may have logits for a part of the vocabulary alone.
        default_params: sampling parameters of requests that give none.
        size: size of the KV caches, if it was chosen before the weights were loaded.
        load_models: function that loads the model, and the draft model if there is one, again from their files; without
            it :meth:`sleep` cannot drop the weights.
        fingerprint: identity of the weights and the precision of the models, see
            :func:`fastinfer.models.fingerprint.fingerprint`; needed to keep the KV cache on disk.
        image_encoder: encoder of images for the model; ``None`` for a model of text alone.
        ranks: the other ranks, of which each has a part of the model as this one has: a part of every weight, or a
            stage (:class:`fastinfer.parallel.stage.Stage`). They end with the engine. ``None`` for a whole model.

    Attributes:
        config: limits and options.
        tokenizer: tokenizer of the model.
        image_encoder: encoder of images for the model; ``None`` for a model of text alone.
        default_params: sampling parameters of requests that give none.
        vocab_size: number of tokens of the model.
        adapters: the registered LoRA adapters.
        max_model_len: longest sequence in tokens.
        fingerprint: hash of everything that decides the keys and values of a token apart from adapters: weights,
            precision, dtype of the cache, kernels, versions. Empty if the identity of the weights is not known; another
            one, which no other engine has, after they were loaded again.
        block_manager: manager of the blocks of the KV caches.
        offloading: stores of blocks in host memory and on disk; ``None`` without any.
        scheduler: scheduler, which chooses what each step computes.
        sampler: sampler of the next tokens.
        worker, draft_worker: what computes the model and the draft model, which is ``None`` without one.
        speculator: source of draft tokens; ``None`` without speculation.
        grammars: compiler of grammars for structured outputs.
        pinned_prompts: the pinned prompts by name.
        requests: the unfinished requests.
        ranks: the other ranks that have parts of the model; ``None`` for a whole model.
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
        size: KVCacheSize | None = None,
        load_models: LoadModels | None = None,
        fingerprint: str = "",
        image_encoder: ImageEncoder | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.config = config = config or EngineConfig()
        self.tokenizer = tokenizer
        self.image_encoder = image_encoder
        self.default_params = default_params
        check_has_all_logits(model)
        self.vocab_size = model.config.vocab_size
        model, self.adapters = _with_adapters(model, config)
        models = [model.config] if draft_model is None else [model.config, draft_model.config]
        size = size or kv_cache_size(config, models)
        self.max_model_len = size.max_model_len
        self.sampler = make_sampler(config, model, tokenizer)
        draft_sampler = None
        if draft_model is not None:
            check_draft_model(config, model.config, draft_model.config, self.max_model_len)
            draft_sampler = make_sampler(config, model, tokenizer)
        differs = any(roles_differ(device, model.exact) for device in config.devices)
        has_roles = config.sparse_attention is not None or differs
        self.ranks = ranks
        group = None if ranks is None else ranks.group
        if (1 if group is None else group.size) != config.num_ranks:
            raise RequestError(f"an engine whose model {config.num_ranks} ranks compute needs as many ranks")
        options: dict[str, Any] = {"size": size, "separates_roles": has_roles}
        with_adapters, has_head = config.max_loras > 0, isinstance(draft_model, DraftHead)
        with self._context():  # on a GPU the workers capture their graphs here
            dense = replace(config, sparse_attention=None)
            if isinstance(draft_model, DraftHead):
                assert isinstance(model, Decoder)
                draft_model = draft_model.for_model(model, config.max_num_batched_tokens)
            self.draft_worker = None if draft_model is None else Worker(dense, draft_model, **options)
            if isinstance(draft_model, DraftHead) and self.draft_worker is not None:
                assert isinstance(model, Decoder)
                model = FeatureWriter(draft_model, self.draft_worker.kv_cache).tapped(model)
            options |= {"with_adapters": with_adapters, "drops_rows": not has_head}
            if group is not None:
                assert isinstance(model, Stage)
                wait = None if ranks is None else ranks.wait_until_ready
                self.worker: Worker = RankWorker(config, model, group=group, wait_until_loaded=wait, **options)
            else:
                self.worker = Worker(config, model, **options)
        self._workers = [self.worker] if self.draft_worker is None else [self.worker, self.draft_worker]
        self._samplers = [self.sampler] if draft_sampler is None else [self.sampler, draft_sampler]
        self.speculator = make_speculator(config, self.draft_worker, draft_sampler)
        self.fingerprint = fingerprint_of_blocks(config, models, fingerprint)
        self.offloading = make_offloading(config, self._workers, self.fingerprint)
        self.block_manager = make_block_manager(
            config, size, self.offloading, separates_roles=has_roles and config.deterministic
        )
        self.scheduler = Scheduler(
            self.block_manager,
            config.max_num_seqs,
            config.max_num_batched_tokens,
            separates_roles=has_roles,
            chunk_multiple=config.chunk_multiple,
            num_in_flight=config.pipeline_parallel_size,
        )
        if has_head and load_models is not None:
            load_models = partial(self._load_with_head, load_models)
        self._sleep_mode = SleepMode(
            self._workers, self.block_manager, self.adapters.slots, load_models, self.offloading
        )
        self.grammars = GrammarCompiler(tokenizer, self.vocab_size)
        self.pinned_prompts = PinnedPrompts(self.block_manager, self.max_model_len)
        self.requests = RequestTable(
            self.scheduler,
            self.block_manager,
            self.pinned_prompts,
            self.adapters,
            config.max_num_waiting,
            config.max_num_waiting_tokens,
        )
        self.on_step: Callable[[StepStats], None] | None = None
        self._totals = StepTotals()
        self._validator = RequestValidator(
            config, self.max_model_len, self.vocab_size, self.adapters, modules_obstacle(config, models)
        )
        parts: dict[str, Any] = {
            "draft_worker": self.draft_worker,
            "speculator": self.speculator,
            "sampler": self.sampler,
            "scheduler": self.scheduler,
            "block_manager": self.block_manager,
            "offloading": self.offloading,
            "requests": self.requests,
        }
        if isinstance(self.worker, RankWorker) and config.pipeline_parallel_size > 1:
            self._step: Step = PipelinedStep(self.worker, **parts)
        else:
            self._step = Step(worker=self.worker, runs_ahead=config.runs_ahead, **parts)
        renew_in_children(self)
        if ranks is not None:
            weakref.finalize(self, ranks.close)

    def renew_after_fork(self) -> None:
        """Let a forked child go on with the requests: other threads of the parent may have left them half done.

        From then on torch's own operators use one thread in the child: OpenMP would wait for threads that are gone.
        """
        torch.set_num_threads(1)
        if self.has_unfinished:
            self.requests.awaiting_grammar.renew_after_fork(self._compile_again)
            self.requests.repair()

    def validate(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams | None = None,
        adapter: str | None = None,
        *,
        generates: bool = True,
        images: PromptImages | None = None,
        layout: PromptLayout | None = None,
    ) -> ValidPrompt:
        """Check a request without queueing it.

        Args:
            prompt_token_ids: token ids of the prompt.
            params: sampling parameters; ``None`` to check none.
            adapter: name of a LoRA adapter.
            generates: whether there must be room for at least one generated token.
            images: images of the prompt, whose tokens it has; ``None`` for none.
            layout: layout of a prompt with modules, whose tokens are given by slot; ``None`` for one without.

        Returns:
            The prompt in a form that the methods that queue a request accept without checking it again.

        Raises:
            RequestError: the request can never be served.
        """
        if params is not None:
            self._validator.check_sampling_params(params)
        if images is not None:
            self._validator.check_images(images, params)
        if layout is not None:
            self._validator.check_modules(params)
        truncated = self._validator.truncate(prompt_token_ids, params)
        prompt = self._validator.check_prompt(truncated, generates=generates, images=images, layout=layout)
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
            adapter: name of a LoRA adapter to apply, see :meth:`load_adapter` and :meth:`register_adapter`.
            timeout: seconds in which the request must end; otherwise the next step ends it with the finish reason
                ``"timeout"``. ``None`` for no limit.
            queue_timeout: seconds in which its first tokens must be computed; otherwise it ends in the same way.

        Raises:
            QueueFullError: too many requests or tokens are waiting already.
            RequestError: the request can never be served, or its id is in use.
            UnavailableError: the engine sleeps, see :meth:`sleep`.
        """
        params = params or self.default_params
        self._validator.check_sampling_params(params)
        valid = self._validator.check_prompt(self._validator.truncate(prompt_token_ids, params))
        token_ids = valid.token_ids
        self._validator.check_timeouts(timeout, queue_timeout)
        request = GenerationRequest(
            self._new_id(request_id, len(token_ids)),
            token_ids,
            params,
            self._validator.sequence_options(priority, cache_salt, adapter, valid),
            prompt=prompt,
            tokenizer=self.tokenizer,
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
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
            QueueFullError, RequestError, UnavailableError: same as for :meth:`add_request`.
        """
        token_ids = self._validator.check_prompt(prompt_token_ids).token_ids
        self._validator.check_beam_search_params(params)
        self._validator.check_timeouts(timeout, queue_timeout)
        request = BeamRequest(
            self._new_id(request_id, len(token_ids)),
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
            QueueFullError, RequestError, UnavailableError: same as for :meth:`add_request`.
        """
        token_ids = self._validator.check_prompt(prompt_token_ids, generates=False).token_ids
        self._validator.check_pooling(pooling)
        self._validator.check_timeouts(timeout, queue_timeout)
        options = self._validator.sequence_options(priority, cache_salt, adapter)
        request = EmbeddingRequest(
            self._new_id(request_id, len(token_ids)), token_ids, options, pooling=pooling, normalize=normalize
        )
        return self.requests.add(request, None, timeout, queue_timeout)

    def pin_prompt(
        self,
        name: str,
        prompt_token_ids: list[int] | ValidPrompt,
        *,
        request_id: str | None = None,
        cache_salt: str = "",
        adapter: str | None = None,
    ) -> str:
        """Queue a pinned prompt: a common beginning of prompts that stays in the cache until it is removed.

        Args:
            name: name for :meth:`pinned_prompt` and :meth:`unpin_prompt`.
            prompt_token_ids: token ids of the prompt, or the prompt that :meth:`validate` returned.
            request_id: same as for :meth:`add_request`.
            cache_salt, adapter: values that requests must have to share the prompt, see :meth:`add_request`.

        Returns:
            The id of the request that computes the prompt; its blocks are shared as soon as they are full.

        Raises:
            QueueFullError, UnavailableError: same as for :meth:`add_request`.
            RequestError: same as for :meth:`add_request`; also if the name is in use, if prefix caching is off, or if
                the cache could no longer hold a sequence of the maximum length beside the prompt.
        """
        valid = self._validator.check_prompt(prompt_token_ids)
        token_ids = valid.token_ids
        options = self._validator.sequence_options(0, cache_salt, adapter, valid)
        request = PrefillRequest(self._new_id(request_id, len(token_ids)), token_ids, options)
        self.pinned_prompts.add(name, PinnedPrompt(request.sequences[0], options))
        return self.requests.add(request)

    def unpin_prompt(self, name: str) -> None:
        """Remove a pinned prompt; its blocks stay in the prefix cache until they are reused.

        If the prompt is still being computed, its request ends with the finish reason ``"abort"``.

        Raises:
            RequestError: there is no pinned prompt of this name.
        """
        sequence = self.pinned_prompts.get(name).sequence
        is_computed = sequence.state is SequenceState.FINISHED  # from then on another request may have its id
        if not is_computed and (output := self.abort(sequence.request_id)) is not None:
            self.requests.deliver_later(output)  # a caller may be waiting for this output
        self.pinned_prompts.forget([sequence])
        self.block_manager.free(sequence)

    def pinned_prompt(self, name: str) -> PinnedPrompt:
        """Return the pinned prompt of this name.

        Raises:
            RequestError: there is no pinned prompt of this name.
        """
        return self.pinned_prompts.get(name)

    def read_adapter(self, path: str | Path) -> PreparedAdapter:
        """Read a LoRA adapter for :meth:`load_adapter`; may be called in any thread.

        Raises:
            AdapterError: the adapter cannot be read, or does not fit the model.
            RequestError: ``max_loras`` is 0.
        """
        return self.adapters.read(path)

    def load_adapter(self, name: str, adapter: str | Path | PreparedAdapter, *, replace: bool = False) -> None:
        """Read a LoRA adapter for requests that name it, and keep it in host memory.

        ``max_loras`` adapters can run at the same time, and ``max_cpu_loras`` are kept in host memory. If there are
        more, the least recently used ones make room and are read again when a request needs them; such a request waits
        without holding up others.

        Args:
            name: name by which requests refer to the adapter.
            adapter: folder in the format that PEFT saves, or what :meth:`read_adapter` has read from it. The files must
                stay as they are.
            replace: whether it takes the place of an adapter of this name, which stays if there is an error.

        Raises:
            AdapterError: the adapter cannot be read, or does not fit the model.
            RequestError: the name is in use, or with ``replace`` an unfinished request or a pinned prompt uses the
                adapter of this name; or ``max_loras`` is 0.
            UnavailableError: the engine sleeps.
        """
        self._check_awake()
        self.adapters.load(name, adapter, self._used_adapters() if replace else None)

    def register_adapter(self, name: str, path: str | Path) -> None:
        """Register a LoRA adapter that is read, in a thread of its own, when the first request names it.

        If it cannot be read, or does not fit the model, the requests that wait for it end with the finish reason
        ``"error"``.

        Args:
            name: name by which requests refer to the adapter.
            path: folder in the format that PEFT saves; its files must stay as they are once they have been read.

        Raises:
            RequestError: the name is in use, or ``max_loras`` is 0.
        """
        self.adapters.register(name, path)

    def unload_adapter(self, name: str) -> None:
        """Forget a LoRA adapter.

        Raises:
            RequestError: there is no adapter of this name, or an unfinished request or a pinned prompt uses it.
            UnavailableError: the engine sleeps.
        """
        self._check_awake()
        self.adapters.unload(name, self._used_adapters())

    def adapters_in_use(self) -> tuple[list[str], list[str]]:
        """Return the names of the adapters of running and of waiting requests, sorted; may be called in any thread."""
        running: set[str] = set()
        waiting: set[str] = set()
        for request in list(self.requests.active.values()):
            sequence = request.sequences[0]
            is_running = any(s.state is SequenceState.RUNNING for s in request.sequences)
            (running if is_running else waiting).add(self.adapters.name(sequence.adapter_key))
        return sorted(running - {""}), sorted(waiting - {""})

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
    def model(self) -> Model:
        """The model, with slots for LoRA adapters if there are any; not to be used while the engine sleeps."""
        return self.worker.model

    def check_sleep(self, level: int) -> None:
        """Check that the engine can sleep at this level once it has no requests.

        Raises:
            RequestError: there is no such level, the engine sleeps already, level 2 needs ``load_models``, the model is
                divided among GPUs.
        """
        self._sleep_mode.check(level)
        if self.config.num_ranks > 1 and self.config.device != "cpu":
            raise RequestError("a model that is divided among GPUs cannot sleep")

    def sleep(self, level: int = 1) -> None:
        """Free memory until :meth:`wake_up`; meanwhile all requests are refused.

        The KV cache and the recorded graphs are freed, and the prefix cache is empty afterwards. Level 1 moves the
        weights from a GPU to the host's memory; on a CPU they stay where they are. Level 2 drops the weights, which
        :meth:`wake_up` loads again from their files. LoRA adapters stay loaded.

        Args:
            level: 1 or 2.

        Raises:
            RequestError: the same as for :meth:`check_sleep`, or a request is unfinished.
        """
        self.check_sleep(level)
        if self.has_unfinished:
            raise RequestError(f"sleep needs an engine without unfinished requests, got {len(self.requests.active)}")
        self._step.forget_launched()
        with self._context():
            self._sleep_mode.sleep(level, self.pinned_prompts.sequences)
        if self.image_encoder is not None:
            self.image_encoder.release()

    def wake_up(self) -> None:
        """Get back what :meth:`sleep` has freed, and compute the pinned prompts again; do nothing if awake.

        If it raises an error, the engine sleeps on, unless :attr:`is_sleeping` is False: then some pinned prompts could
        not be computed, and are lost. If another rank could not load its part, the engine is lost, see
        :attr:`lost_ranks`.

        Raises:
            OutOfMemoryError: there is too little memory on the device now.
            RequestError: the files now hold another model.
            FastinferError: the files cannot be read any more.
            RuntimeError: pinned prompts could not be computed, or another rank could not load its part.
        """
        if not self.is_sleeping:
            return
        if self.lost_ranks:
            raise RuntimeError(self.lost_ranks)
        is_reloaded = self._sleep_mode.level == 2
        with self._context():  # on a GPU the workers capture their graphs here
            self._sleep_mode.wake_up()
        if is_reloaded:  # from files that may have changed
            self.fingerprint = secrets.token_hex(32)
        names, lost = self._pin_again(), {}
        try:
            while self.has_unfinished:
                for output in self.step():
                    if isinstance(output, PrefillOutput) and output.finish_reason == "error":
                        lost[names[output.request_id]] = output.stop_reason
        except BaseException as error:
            for request_id in list(self.requests.active):
                self.abort(request_id, error)
            raise
        if lost:
            raise RuntimeError(f"pinned prompts could not be computed again and are lost: {lost}")

    def reset_prefix_cache(self) -> None:
        """Forget the cached prefixes in the KV cache and in host memory.

        Unfinished requests keep what is computed of them. The next steps compute the pinned prompts again, those of a
        sleeping engine when it wakes up. The files in ``kv_offloading_dir`` stay: they outlive the engine.
        """
        if not self.is_sleeping:
            self._pin_again()
        self.block_manager.reset_prefix_cache()
        if self.offloading is not None:
            with self._context():
                self.offloading.save()  # or else what is noted for host memory would get there later
            if self.offloading.host is not None:
                self.offloading.host.clear()

    @property
    def lost_ranks(self) -> str:
        """Reason for which other ranks, and with them the engine, are lost; empty while all ranks work."""
        group = None if self.ranks is None else self.ranks.group
        return group.end_message(group.cause) if group is not None and group.cause else ""

    @property
    def is_sleeping(self) -> bool:
        """Whether requests are refused until :meth:`wake_up`."""
        return self._sleep_mode.level > 0

    @property
    def has_unfinished(self) -> bool:
        """Whether there is anything for a step to compute or to return."""
        return self.requests.has_unfinished

    def stats(self) -> EngineStats:
        """Return the current load, and counters since the start."""
        manager, scheduler = self.block_manager, self.scheduler
        running = scheduler.running
        tables = [(sequence.num_computed_tokens, table) for sequence in running for table in sequence.block_tables]
        slots = sum(table.num_held for _, table in tables) * manager.block_size
        tokens = sum(computed - table.num_dropped * manager.block_size for computed, table in tables)
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
            num_draft_rounds=self.speculator.num_rounds if self.speculator else 0,
            num_eager_steps=sum(worker.num_eager_steps for worker in self._workers),
            num_failed_graphs=sum(worker.num_failed_graphs for worker in self._workers),
            num_failed_draws=sum(sampler.num_failed_draws for sampler in self._samplers),
            num_steps=self._totals.num_steps,
            num_waited_steps=self._step.num_waited_steps,
            num_prompt_tokens=self._totals.num_prompt_tokens,
            num_generated_tokens=self._totals.num_generated_tokens,
            num_repairs=self.requests.num_repairs,
            num_expired=self.requests.num_expired,
            is_sleeping=self.is_sleeping,
            num_adapter_loads=self.adapters.num_loads,
            **({} if self.offloading is None else self.offloading.stats()),
        )

    def step(self) -> list[Output]:
        """Compute the next tokens, and return the outputs of the requests that made progress or ended."""
        self._compute()
        return list(self.requests.pop_undelivered())

    def step_into(self, outputs: deque[Output]) -> None:
        """Do the same as :meth:`step`, but append the outputs to a queue, where an interrupt cannot lose them."""
        self._compute()
        outputs.extend(self.requests.pop_undelivered())

    def _compute(self) -> None:
        with torch.inference_mode(), self._context():
            stats = self._step()
        if stats is not None:
            self._totals.add(stats)
            self._report(stats)

    def _pin_again(self) -> dict[str, str]:
        """Free the blocks of the pinned prompts that are computed, and queue these anew; return names by request id."""
        names = {}
        with deferred_interrupts():  # or blocks could belong to nobody, and a prompt could have none
            for name, pinned in self.pinned_prompts.computed.items():
                # Not a generated id, which a user of AsyncEngine may have chosen for a request that is not queued yet.
                request = PrefillRequest(secrets.token_hex(8), pinned.token_ids, pinned.options)
                self.pinned_prompts.replace(name, PinnedPrompt(request.sequences[0], pinned.options))
                self.block_manager.free(pinned.sequence)
                names[self.requests.add(request)] = name
        return names

    def _load_with_head(self, load_models: LoadModels) -> list[Model]:
        """Load the model and its draft head again, and connect them as they were."""
        model, head = load_models()
        assert isinstance(model, Decoder)
        assert isinstance(head, DraftHead)
        assert self.draft_worker is not None
        head = head.for_model(model, self.config.max_num_batched_tokens)
        return [FeatureWriter(head, self.draft_worker.kv_cache).tapped(model), head]

    def _compile_again(self, request: Request) -> Future[Grammar]:
        constraint = request.sequences[0].params.structured_outputs
        assert constraint is not None
        return self.grammars.submit(constraint)

    def _new_id(self, request_id: str | None, num_tokens: int) -> str:
        """Return the id of a new request with a prompt of this length, if it may be queued."""
        self._check_awake()
        self.requests.check_room(num_tokens)
        return self.requests.new_id(request_id)

    def _used_adapters(self) -> list[str]:
        """Return the keys of the adapters of all unfinished requests and of pinned prompts, one for each."""
        requests = [request for request in self.requests.active.values() if request.unfinished]
        users = [request.sequences[0] for request in requests] + self.pinned_prompts.sequences
        return [sequence.adapter_key for sequence in users]

    def _check_awake(self) -> None:
        if self.is_sleeping:
            raise UnavailableError(self.lost_ranks or "the engine sleeps until wake_up() is called")

    def _report(self, stats: StepStats) -> None:
        """Call the observer of steps; its errors must not end any request."""
        if self.on_step is None:
            return
        try:
            self.on_step(stats)
        except Exception:
            LOG.exception("on_step failed")

    def _context(self) -> AbstractContextManager[None]:
        return model_context(self.config.device, self.config.deterministic)


def _with_adapters(model: Model, config: EngineConfig) -> tuple[Model, Adapters]:
    """Return the model, with slots for LoRA adapters if the configuration has any, and the manager of the slots."""
    if not config.max_loras:
        return model, Adapters()
    slots = model.adapters  # of a part of a model
    if slots is None:
        places = model.places if isinstance(model, PlacedDecoder) else ()
        sizes = config.max_loras, config.max_lora_rank, config.lora_dtype
        slots = AdapterSlots(model.config, *sizes, config.device, places)
    return model.with_adapters(slots), Adapters(slots, config.max_cpu_loras or config.max_loras)
