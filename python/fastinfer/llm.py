"""Synchronous interface: load a model by name or path and generate text with it."""

import contextlib
import dataclasses
import functools
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fastinfer import hub
from fastinfer.engine.config import MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS, EngineConfig
from fastinfer.engine.construction import check_draft_model, kv_cache_size
from fastinfer.engine.disk_block_store import prepare_folder
from fastinfer.engine.engine import Engine
from fastinfer.engine.kv_cache_size import KVCacheSize, options_for, options_for_memory, room_on
from fastinfer.engine.placement import (
    cache_shares,
    common_dtype,
    place_model,
    room_on_devices,
    room_on_ranks,
    weight_bytes_by_device,
)
from fastinfer.engine.rank_process import RankTask, start_ranks
from fastinfer.engine.replica_share import ReplicaShare
from fastinfer.engine.request_validator import POOLINGS
from fastinfer.errors import RequestError
from fastinfer.models import (
    LoadWeights,
    Model,
    load_model,
    load_weights,
    load_whole_head,
    open_checkpoint,
    open_mtp_checkpoint,
)
from fastinfer.models.checkpoint import Checkpoint, ModelPart
from fastinfer.models.config import Precision
from fastinfer.models.fingerprint import fingerprint
from fastinfer.models.image_encoder import image_encoder_of
from fastinfer.models.layer_places import LayerPlace
from fastinfer.models.placed_decoder import load_placed
from fastinfer.models.shared_model import SharedWeights
from fastinfer.outputs import PrefillOutput, RequestOutput, ScoreOutput
from fastinfer.parallel.division import Layout
from fastinfer.parallel.group import Group
from fastinfer.parallel.layer_split import stages_of
from fastinfer.parallel.ranks import Ranks
from fastinfer.parallel.support import check_divisible, check_gpus
from fastinfer.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from fastinfer.serving.jobs import QueueRequest, beam_search_job, embedding_job, generation_job, pinned_prompt_job
from fastinfer.serving.prompt import PreparedPrompt, Prompt, prepare, prepare_chat
from fastinfer.serving.sampling_defaults import sampling_defaults
from fastinfer.serving.scoring import SCORE_PARAMS, Scorable, prepare_score, score_of
from fastinfer.serving.shared_engine import Job, SharedEngine
from fastinfer.utils.checks import check_choice, check_path, check_text
from fastinfer.utils.device import resolve_places
from fastinfer.utils.dtypes import DTYPES, KV_CACHE_DTYPES
from fastinfer.utils.memory_errors import explained_memory_errors

LOG = logging.getLogger("fastinfer")

FINAL_ONLY = RequestOutputKind.FINAL_ONLY
Outputs = Generator[RequestOutput, None, None]


class LLM:
    """A loaded model that generates text.

    Several threads may call it at the same time; their requests run in the same steps.

    Args:
        model: a name or path that :func:`fastinfer.hub.resolve` knows.
        dtype: ``"float32"``, ``"bfloat16"``, ``"float16"``, or ``"auto"`` for the fastest one on this machine.
        device: ``"cpu"``, ``"cuda"`` for the current GPU, ``"cuda:N"``, or ``"auto"`` for a GPU if there is one. A list
            places layers on several devices (``"cuda:0=24,cuda:1=8"``), or a model's experts on another one
            (``"cuda+cpu"``): docs/placement.md.
        draft_model: name or path of a smaller model with the same vocabulary, or of a draft head, that drafts tokens
            for speculative decoding; its output layer may have a part of the vocabulary alone (``d2t``). ``"mtp"``
            drafts with the model's own layers for multi-token prediction. Draft heads: docs/draft-heads.md. Without any
            of these, ``num_speculative_tokens`` are drafted from n-grams of the text itself.
        mmproj: a GGUF file with the encoder of images for a model that is a GGUF file, or the name of one. ``None`` for
            the only file beside the model that has "mmproj" in its name, if it is there and fits.
        kv_cache_dtype: dtype of the cached keys and values: one of the values of ``dtype``, ``"int8"``, ``"fp8"``
            (float8_e4m3fn), ``"int4"`` (least memory, with a measurable loss: see docs/performance.md), or ``"auto"``
            for the one that suits ``dtype``. On a GPU only ``"auto"``, ``"int8"``, ``"fp8"`` and ``"int4"`` work.
        max_num_waiting, max_num_waiting_tokens: largest number of requests waiting in the engine, and of their tokens;
            further prompts wait outside it.
        max_num_seqs, max_num_batched_tokens: see :class:`fastinfer.engine.config.EngineConfig`; ``None`` for 64 and 512
            on a CPU, 256 and 2048 on a GPU.
        max_model_len, block_size, kv_cache_memory, gpu_memory_utilization, max_stop_strings,
            max_stop_string_length, max_stop_token_ids, max_bad_words, max_logit_bias: see
            :class:`fastinfer.engine.config.EngineConfig`.
        kv_offloading_size, kv_offloading_dir, kv_offloading_dir_size: see
            :class:`fastinfer.engine.config.EngineConfig`.
        enable_prefix_caching, num_speculative_tokens, sparse_attention, max_loras, max_cpu_loras, max_lora_rank,
            deterministic, enforce_eager: see :class:`fastinfer.engine.config.EngineConfig`.
        tensor_parallel_size: number of processes of this machine that compute the model together, each with a part of
            every weight and of the machine's threads. Results are bitwise those of one process. On GPUs, process i is
            on the GPU whose number is i more than that of ``device``, and the layout must be ``"reduce"``. What works
            with it, and when it pays: docs/tensor-parallelism.md.
        tensor_parallel_layout: see :class:`fastinfer.engine.config.EngineConfig`.
        pipeline_parallel_size: number of stages, processes of this machine that compute the model together, each some
            of its layers, with several steps in flight; on a CPU alone. Results are bitwise those of one process. What
            works with it, and when it pays: docs/pipeline-parallelism.md.
        pipeline_parallel_layers: see :class:`fastinfer.engine.config.EngineConfig`.
        share: what this process shares with other replicas on a CPU; ``fastinfer serve --data-parallel-size`` sets it.

    Attributes:
        engine: the engine that runs the requests. Only its ``stats()`` may be called from outside.
        tokenizer: the model's tokenizer.

    Raises:
        ModelNotFoundError: there is no such model.
        UnsupportedModelError: the model's architecture is not implemented.
        RequestError: an argument is out of range, or memory is too small for ``max_model_len``.

    Devices: CPU, CUDA.
    """

    def __init__(
        self,
        model: str = hub.DEFAULT_MODEL,
        *,
        dtype: str = "auto",
        device: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        max_num_waiting: int = 10_000,
        max_num_waiting_tokens: int | None = None,
        max_stop_strings: int = 32,
        max_stop_string_length: int = 256,
        max_stop_token_ids: int = 128,
        max_bad_words: int = 64,
        max_logit_bias: int = 300,
        block_size: int = 32,
        kv_cache_dtype: str = "auto",
        kv_cache_memory: int | None = None,
        gpu_memory_utilization: float = 0.9,
        enable_prefix_caching: bool = True,
        kv_offloading_size: float | None = None,
        kv_offloading_dir: str | Path | None = None,
        kv_offloading_dir_size: float = 16.0,
        num_speculative_tokens: int = 0,
        draft_model: str | None = None,
        mmproj: str | None = None,
        sparse_attention: float | None = None,
        max_loras: int = 0,
        max_cpu_loras: int | None = None,
        max_lora_rank: int = 64,
        deterministic: bool = False,
        enforce_eager: bool = False,
        tensor_parallel_size: int = 1,
        tensor_parallel_layout: Layout = "gather",
        pipeline_parallel_size: int = 1,
        pipeline_parallel_layers: Sequence[int] | None = None,
        share: ReplicaShare | None = None,
    ) -> None:
        check_choice("dtype", dtype, DTYPES)
        check_choice("kv_cache_dtype", kv_cache_dtype, KV_CACHE_DTYPES)
        places = resolve_places(device)
        device = places[0].device
        is_placed = len(places) > 1 or places[0].experts is not None
        devices = [device for place in places for device in place.devices]
        dtype = common_dtype(dtype, devices)
        kind, first_gpu = torch.device(device).type, next((name for name in devices if name != "cpu"), None)
        config = EngineConfig(
            max_model_len=max_model_len,
            max_num_seqs=MAX_NUM_SEQS[kind] if max_num_seqs is None else max_num_seqs,
            max_num_batched_tokens=(
                MAX_NUM_BATCHED_TOKENS[kind] if max_num_batched_tokens is None else max_num_batched_tokens
            ),
            max_num_waiting=max_num_waiting,
            max_num_waiting_tokens=max_num_waiting_tokens,
            max_stop_strings=max_stop_strings,
            max_stop_string_length=max_stop_string_length,
            max_stop_token_ids=max_stop_token_ids,
            max_bad_words=max_bad_words,
            max_logit_bias=max_logit_bias,
            block_size=block_size,
            kv_cache_dtype=kv_cache_dtype_of(kv_cache_dtype, dtype, first_gpu or device),
            kv_cache_memory=kv_cache_memory,
            gpu_memory_utilization=gpu_memory_utilization,
            enable_prefix_caching=enable_prefix_caching,
            kv_offloading_size=kv_offloading_size,
            kv_offloading_dir=kv_offloading_dir,
            kv_offloading_dir_size=kv_offloading_dir_size,
            num_speculative_tokens=num_speculative_tokens,
            sparse_attention=sparse_attention,
            max_loras=max_loras,
            max_cpu_loras=max_cpu_loras,
            max_lora_rank=max_lora_rank,
            lora_dtype=torch.float32 if dtype == "float32" else torch.bfloat16,
            deterministic=deterministic,
            device=device,
            places=places if is_placed else (),
            enforce_eager=enforce_eager,
            tensor_parallel_size=tensor_parallel_size,
            tensor_parallel_layout=tensor_parallel_layout,
            pipeline_parallel_size=pipeline_parallel_size,
            pipeline_parallel_layers=pipeline_parallel_layers,
        )
        if kv_offloading_dir is not None:
            prepare_folder(Path(kv_offloading_dir))  # before the weights are loaded, which takes longer
        precision = Precision.of(dtype, device)
        path = hub.resolve(model)
        sources = [partial(open_checkpoint, path, precision.exact)]
        if draft_model == hub.MTP:
            sources.append(partial(open_mtp_checkpoint, path, precision.exact, num_speculative_tokens or 1))
        elif draft_model is not None:
            sources.append(partial(open_checkpoint, hub.resolve(draft_model), precision.exact))
        checkpoints = [source() for source in sources]
        encoder = None
        if config.num_ranks == 1:
            images = None if mmproj is None else hub.resolve(mmproj)
            encoder = image_encoder_of(checkpoints[0], precision, device, images)
        elif mmproj is not None:
            raise RequestError(f"mmproj must be None with more than one rank, got {mmproj!r}")
        if tensor_parallel_size > 1:
            check_divisible(checkpoints[0], tensor_parallel_size, tensor_parallel_layout)
        if tensor_parallel_size > 1 and device != "cpu":
            if draft_model is not None:
                raise RequestError(
                    f"draft_model must be None with {tensor_parallel_size=} on GPUs, got {draft_model!r}"
                )
            check_gpus([config.device_of(rank) for rank in range(tensor_parallel_size)])
        stages = stages_of(checkpoints[0], pipeline_parallel_size, pipeline_parallel_layers)
        layer_places = place_model(checkpoints[0], places) if is_placed else ()
        size = _choose_kv_cache_size(config, checkpoints, share, layer_places)
        if draft_model is not None:
            check_draft_model(config, checkpoints[0].config, checkpoints[1].config, size.max_model_len)
        has_head = any(checkpoint.config.is_draft_head for checkpoint in checkpoints)
        defaults = sampling_defaults(checkpoints[0])
        ranks = task = None
        if config.num_ranks > 1:
            task = RankTask(path, dtype, config, size, stages, drops_rows=not has_head)
            ranks = start_ranks(task)
        with (
            _closed_on_error(ranks),
            explained_memory_errors(_memory_needs(config, size, checkpoints), options_for_memory(config)),
        ):
            loads: list[LoadWeights] = [load_weights] * len(checkpoints)
            if ranks is not None and task is not None:
                loads[0] = partial(_load_part, task, ranks.group)
                if has_head:
                    loads[1] = partial(load_whole_head, sources[0])
            elif layer_places:
                loads[0] = partial(load_placed, layer_places)
            elif share is not None and share.weights:
                loads = [SharedWeights(descriptor) for descriptor in share.weights]
            loaded, self.tokenizer = load_model(checkpoints[0], dtype, device, size.max_model_len, loads[0])
            draft = None
            if draft_model is not None:
                draft = loads[1](checkpoints[1], dtype, device, size.max_model_len)

            def load_models() -> list[Model]:
                return [
                    load(source(), dtype, device, size.max_model_len)
                    for source, load in zip(sources, loads, strict=True)
                ]

            if ranks is not None:
                ranks.wait_until_ready()
            files = [] if encoder is None else encoder.files
            identity = fingerprint(checkpoints, precision, size.max_model_len, files)
            # Shared weights stay in memory for the other replicas: sleep of level 2 would free nothing.
            reload = None if share is not None and share.weights else load_models
            if ranks is not None and device != "cpu":
                ranks.group.start_together()  # to record their steps
            self.engine = Engine(
                loaded, self.tokenizer, config, draft, defaults, size, reload, identity, encoder, ranks
            )
            if ranks is not None and device != "cpu":
                ranks.wait_until_ready()
        self._shared = SharedEngine(self.engine)
        self._numbers = itertools.count()

    @property
    def default_params(self) -> SamplingParams:
        """Sampling parameters of requests that give none.

        They come from ``generation_config.json``, or from the ``general.sampling`` keys of a GGUF file. A checkpoint
        without any has temperature 0.7 and top_p 0.95.
        """
        return self.engine.default_params

    def generate(
        self,
        prompts: Prompt | list[Prompt],
        params: SamplingParams | list[SamplingParams] | None = None,
        *,
        priority: int | list[int] = 0,
        adapter: str | list[str | None] | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Complete prompts. They run together as far as the engine's limits allow.

        Args:
            prompts: one prompt or a list; each is text, ``{"prompt": text}`` or ``{"prompt_token_ids": [...]}``. A
                dictionary may also have a ``"cache_salt"`` (only prompts with the same salt share cached prefixes) or a
                ``"pinned_prompt"`` (name of a text that precedes the prompt, see :meth:`pin_prompt`).
            params: one object for all prompts, or one per prompt; :attr:`default_params` by default.
            priority: one number for all prompts, or one per prompt; smaller numbers are served first.
            adapter: name of a LoRA adapter (:meth:`load_adapter`), one for all prompts or one per prompt.
            use_tqdm: show a progress bar on stderr.

        Returns:
            One finished output per prompt, in the same order.

        Raises:
            RequestError: a prompt or its parameters cannot be served. Nothing has been computed in this case.
        """
        many = prompts if isinstance(prompts, list) else [prompts]
        jobs = self._jobs([prepare(self.engine, prompt) for prompt in many], params, priority, adapter, FINAL_ONLY)
        return self._shared.complete(jobs, use_tqdm)

    def beam_search(
        self,
        prompts: Prompt | list[Prompt],
        params: BeamSearchParams,
        *,
        priority: int = 0,
        adapter: str | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts by beam search; the completions of each output are sorted, the best one first.

        Args:
            prompts: one prompt or a list, as for :meth:`generate`.
            params: parameters of the search.
            priority, adapter: as for :meth:`generate`, one value for all prompts.

        Raises:
            RequestError: a prompt cannot be served. Nothing has been computed in this case.
        """
        options: dict[str, Any] = {"priority": priority, "adapter": adapter}
        jobs: list[Job[RequestOutput]] = []
        for prompt in prompts if isinstance(prompts, list) else [prompts]:
            prepared = prepare(self.engine, prompt)
            jobs.append(self._job(beam_search_job, prepared, params, **options))
        return self._shared.complete(jobs)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, adapter: str | None = None
    ) -> Generator[str, None, None]:
        """Complete one prompt and yield the text in pieces, which add up to the text of :meth:`generate`.

        Closing the iterator aborts the request. ``adapter`` is the name of a LoRA adapter, as for :meth:`generate`.

        Raises:
            RequestError: the prompt cannot be served, or ``params.n`` is not 1.
            RuntimeError: the request failed while it was running.
        """
        if isinstance(params, SamplingParams) and params.n != 1:
            raise RequestError(f"n must be 1 for stream, which yields one text, got {params.n}")
        return _pieces(self.stream_outputs(prompt, params, adapter=adapter))

    def stream_outputs(
        self, prompt: Prompt, params: SamplingParams | None = None, *, adapter: str | None = None
    ) -> Outputs:
        """Complete one prompt and yield an output after every token, as ``params.output_kind`` says.

        If other threads compute further tokens before the next output is asked for, one output reports them all.
        Closing the iterator aborts the request. ``adapter`` is the name of a LoRA adapter, as for :meth:`generate`.

        Raises:
            RequestError: the prompt cannot be served.
        """
        return self._shared.run(self._jobs([prepare(self.engine, prompt)], params, adapter=adapter))

    def chat(
        self,
        messages: list[dict[str, Any]],
        params: SamplingParams | None = None,
        *,
        template_variables: dict[str, Any] | None = None,
        adapter: str | None = None,
    ) -> RequestOutput:
        """Answer a conversation, such as ``[{"role": "user", "content": "Hello"}]``.

        Args:
            messages: messages, see :func:`fastinfer.tokenizers.chat_template.render`; for images see
                :func:`fastinfer.serving.images.take_images`.
            params: sampling parameters; :attr:`default_params` by default.
            template_variables: variables of the model's chat template, such as ``tools`` and ``enable_thinking``.
            adapter: name of a LoRA adapter, as for :meth:`generate`.

        Raises:
            RequestError: the conversation cannot be served.
            UnsupportedModelError: the model has no chat template.
        """
        prompt = prepare_chat(self.engine, messages, template_variables)
        jobs = self._jobs([prompt], params, adapter=adapter, output_kind=FINAL_ONLY)
        return self._shared.complete(jobs)[0]

    def stream_chat(
        self,
        messages: list[dict[str, Any]],
        params: SamplingParams | None = None,
        *,
        template_variables: dict[str, Any] | None = None,
        adapter: str | None = None,
    ) -> Outputs:
        """Answer a conversation as :meth:`chat` does and yield the outputs as :meth:`stream_outputs` does."""
        prompt = prepare_chat(self.engine, messages, template_variables)
        return self._shared.run(self._jobs([prompt], params, adapter=adapter))

    def embed(
        self,
        prompts: Prompt | list[Prompt],
        *,
        pooling: str = "mean",
        normalize: bool = True,
        priority: int = 0,
        adapter: str | None = None,
    ) -> list[PrefillOutput]:
        """Compute embeddings of prompts from the hidden states after the last norm.

        Args:
            prompts: one prompt or a list, as for :meth:`generate`.
            pooling: ``"mean"`` over all tokens, or the ``"last"`` token.
            normalize: scale each vector to length 1.
            priority, adapter: as for :meth:`generate`, one value for all prompts.

        Returns:
            One output with an ``embedding`` per prompt, in the same order.

        Raises:
            RequestError: a prompt cannot be served. Nothing has been computed in this case.
        """
        check_choice("pooling", pooling, POOLINGS)
        options: dict[str, Any] = {"pooling": pooling, "normalize": normalize, "priority": priority, "adapter": adapter}
        jobs: list[Job[PrefillOutput]] = []
        for prompt in prompts if isinstance(prompts, list) else [prompts]:
            prepared = prepare(self.engine, prompt)
            jobs.append(self._job(embedding_job, prepared, **options))
        return self._shared.complete(jobs)

    def score(self, prompts: Scorable | list[Scorable]) -> list[ScoreOutput]:
        """Compute the log-likelihood of texts, or of continuations given their contexts.

        A single prompt is scored from its second token on. For a pair (context, continuation), only the tokens of the
        continuation are scored. Its two parts are tokenised separately and joined, so no token spans the border; a
        space between them belongs to the continuation.

        Args:
            prompts: one item or a list; each is a prompt as for :meth:`generate`, or a pair of prompts.

        Raises:
            RequestError: a prompt cannot be served, or a context or continuation has no token. Nothing has been
                computed in this case.
            RuntimeError: a request failed while it was running.
        """
        jobs: list[Job[RequestOutput]] = []
        starts = []
        for item in prompts if isinstance(prompts, list) else [prompts]:
            joined, start = prepare_score(self.engine, item)
            jobs += self._jobs([joined], SCORE_PARAMS)
            starts.append(start)
        return [score_of(output, start) for output, start in zip(self._shared.complete(jobs), starts, strict=True)]

    def pin_prompt(self, name: str, prompt: Prompt, *, adapter: str | None = None) -> None:
        """Compute a text, such as a system prompt, and keep it in the cache until :meth:`unpin_prompt`.

        Prompts that begin with it (``{"prompt": text, "pinned_prompt": name}``) reuse its whole cache blocks and
        inherit its ``cache_salt``. The pinned prompt and the text that follows it are tokenised separately.

        Args:
            name: name of the pinned prompt.
            prompt: the text, as for :meth:`generate`.
            adapter: LoRA adapter of the prompts that will name it; prompts with another adapter cannot reuse its blocks
                and compute its text themselves.

        Raises:
            RequestError: the text cannot be served, the name is taken, prefix caching is off, or the cache has no room.
            RuntimeError: the computation failed.
        """
        check_text("name", name)
        job: Job[PrefillOutput] = self._job(pinned_prompt_job, name, prepare(self.engine, prompt), adapter=adapter)
        [output] = self._shared.complete([job])
        if output.finish_reason == "error":
            raise RuntimeError(f"the request failed: {output.stop_reason}")

    def unpin_prompt(self, name: str) -> None:
        """Release a pinned prompt; prompts can no longer name it.

        Raises:
            RequestError: there is no pinned prompt of this name.
        """
        with self._shared.lock:
            self.engine.unpin_prompt(name)

    def load_adapter(self, name: str, path: str | Path) -> None:
        """Load a LoRA adapter from a folder saved by PEFT. Prompts select it by name; ``max_loras`` must be at least 1.

        Any number of adapters may be loaded. ``max_loras`` of them can run at the same time, and ``max_cpu_loras`` are
        kept in host memory; the least recently used ones are read again when they are needed, so their files must stay.

        Raises:
            AdapterError: the adapter cannot be read, or does not fit the model.
            RequestError: the name is taken, or ``max_loras`` is 0.
        """
        check_path("path", path)
        adapter = self.engine.read_adapter(path)  # while other threads' requests run
        with self._shared.lock:
            self.engine.load_adapter(name, adapter)

    def register_adapter(self, name: str, path: str | Path) -> None:
        """Register a LoRA adapter that is read when the first prompt selects it, while other prompts run.

        If it cannot be read, or does not fit the model, the requests for it end with the finish reason ``"error"``.

        Raises:
            RequestError: the name is taken, or ``max_loras`` is 0.
        """
        with self._shared.lock:
            self.engine.register_adapter(name, path)

    def unload_adapter(self, name: str) -> None:
        """Forget a LoRA adapter.

        Raises:
            RequestError: there is no adapter of this name, or an unfinished request or a pinned prompt uses it.
        """
        with self._shared.lock:
            self.engine.unload_adapter(name)

    def sleep(self, level: int = 1) -> None:
        """Free memory until :meth:`wake_up`; meanwhile every request raises an UnavailableError.

        The KV cache is freed, with all cached prefixes. Level 1 also moves the weights from a GPU to the host's memory;
        on a CPU they stay where they are. Level 2 drops the weights, which :meth:`wake_up` loads again from their
        files. LoRA adapters and pinned prompts are still there afterwards; the prompts are computed again.

        Args:
            level: 1 or 2.

        Raises:
            RequestError: there is no such level, the engine sleeps already, or another thread has unfinished requests.
        """
        with self._shared.lock:
            self._shared.abort_abandoned()
            self.engine.sleep(level)

    def wake_up(self) -> None:
        """Get back what :meth:`sleep` has freed; does nothing if nothing has been.

        If it raises an error, it may be called again. Only if pinned prompts could not be computed, everything else is
        back, and these prompts are lost. If another rank could not load its part, load the model anew: all later calls
        raise the same error.

        Raises:
            OutOfMemoryError: the device has too little memory now.
            RequestError: the files now hold another model.
            FastinferError: the files cannot be read any more.
            RuntimeError: pinned prompts could not be computed, or another rank could not load its part.
        """
        with self._shared.lock:
            self.engine.wake_up()

    def _jobs(
        self,
        prompts: list[PreparedPrompt],
        params: SamplingParams | list[SamplingParams] | None,
        priority: int | list[int] = 0,
        adapter: str | list[str | None] | None = None,
        output_kind: RequestOutputKind | None = None,
    ) -> list[Job[RequestOutput]]:
        """Make one job per prompt, with another kind of output if one is given.

        All of them are validated before the first one runs.
        """
        every_params = _one_per_prompt("params", params or self.default_params, len(prompts))
        priorities = _one_per_prompt("priority", priority, len(prompts))
        adapters = _one_per_prompt("adapter", adapter, len(prompts))
        jobs: list[Job[RequestOutput]] = []
        for prompt, its_params, its_priority, its_adapter in zip(
            prompts, every_params, priorities, adapters, strict=True
        ):
            if output_kind is not None and isinstance(its_params, SamplingParams):
                its_params = dataclasses.replace(its_params, output_kind=output_kind)
            jobs.append(self._job(generation_job, prompt, its_params, priority=its_priority, adapter=its_adapter))
        return jobs

    def _job(self, make: Callable[..., QueueRequest], *args: Any, **options: Any) -> Job[Any]:
        """Make a job by a function of :mod:`fastinfer.serving.jobs`, under a new id."""
        request_id = f"llm-{next(self._numbers)}"
        return Job(make(self.engine, *args, request_id=request_id, **options), request_id)


def generate(prompt: str, *, model: str = hub.DEFAULT_MODEL, **sampling: Any) -> str:
    """Complete one prompt. The model stays loaded for the next call.

    Args:
        prompt: the text to continue.
        model: a name or path, as for :class:`LLM`.
        sampling: fields of :class:`SamplingParams`; the others are those of :attr:`LLM.default_params`.

    >>> from fastinfer import generate
    >>> generate("The capital of France is", max_tokens=8, temperature=0.0)
    ' Paris...'
    """
    check_path("model", model)
    llm = _loaded(model)
    return "".join(llm.stream(prompt, dataclasses.replace(llm.default_params, **sampling)))


@functools.lru_cache(maxsize=1)
def _loaded(model: str) -> LLM:
    return LLM(model)


def _pieces(outputs: Outputs) -> Generator[str, None, None]:
    with contextlib.closing(outputs):
        for output in outputs:
            completion = output.outputs[0]
            if completion.delta:
                yield completion.delta
            if completion.finish_reason == "error":
                raise RuntimeError(f"the request failed: {completion.stop_reason}")


def _one_per_prompt(name: str, value: Any, count: int) -> list[Any]:
    values = value if isinstance(value, list) else [value] * count
    if len(values) != count:
        raise RequestError(f"{name} must be one or {count}, as many as prompts, got {len(values)}")
    return values


def _load_part(
    task: RankTask, group: Group, checkpoint: Checkpoint, dtype: str, device: str, max_model_len: int | None
) -> Model:
    """Load rank 0's part of a model, as :func:`fastinfer.models.load_weights` loads a whole one."""
    assert (dtype, device, max_model_len) == (task.dtype, task.config.device, task.size.max_model_len)
    return task.load_model(checkpoint, group)


@contextlib.contextmanager
def _closed_on_error(ranks: Ranks | None) -> Generator[None, None, None]:
    """End the other ranks, if there are any, unless the ``with`` block succeeds."""
    try:
        yield
    except BaseException:
        if ranks is not None:
            ranks.close()
        raise


def _choose_kv_cache_size(
    config: EngineConfig,
    checkpoints: list[Checkpoint],
    share: ReplicaShare | None,
    places: tuple[LayerPlace, ...] = (),
) -> KVCacheSize:
    """Choose the size of the KV cache and the longest sequence, before any weight is read.

    The first checkpoint is the model's, the second, if there is one, the draft model's. ``places`` are those of the
    model's layers if they are on several devices.

    Raises:
        RequestError: weights and KV cache do not fit into memory.
    """
    limit = checkpoints[0].config.max_position
    models = [checkpoint.config for checkpoint in checkpoints]
    if places:
        sizes = Counter(weight_bytes_by_device(checkpoints[0], places))
        sizes[config.device] += sum(checkpoint.weight_bytes(config.device) for checkpoint in checkpoints[1:])
        room = room_on_devices(config, cache_shares(config, models, places), sizes)
    elif config.num_ranks > 1 and config.device != "cpu":
        room = room_on_ranks(config, models[0], checkpoints[0].weight_bytes(config.device))
    else:
        weight_bytes = _weight_bytes(config, checkpoints)
        room = room_on(config, config.device, weight_bytes, None if share is None else share.memory(weight_bytes))
    size = kv_cache_size(config, models, room)
    if config.max_model_len is None and size.max_model_len < limit:
        LOG.warning(
            f"{checkpoints[0].path.name}: max_model_len is {size.max_model_len:,} tokens instead of the model's "
            f"{limit:,}, which fits into the memory for the KV cache. To change it: {options_for(config)}"
        )
    return size


def _weight_bytes(config: EngineConfig, checkpoints: list[Checkpoint]) -> int:
    """Estimate the size of all weights; a draft head beside ranks has an embedding and an output layer of its own."""
    size = sum(checkpoint.weight_bytes(config.device) for checkpoint in checkpoints)
    if config.num_ranks > 1 and any(checkpoint.config.is_draft_head for checkpoint in checkpoints):
        size += checkpoints[0].part_bytes(config.device)[ModelPart(None)]
    return size


def _memory_needs(config: EngineConfig, size: KVCacheSize, checkpoints: list[Checkpoint]) -> str:
    """Describe the memory that a model and its KV cache need, for an error message."""
    weight_bytes = _weight_bytes(config, checkpoints)
    return (
        f"{checkpoints[0].path.name} needs {weight_bytes} bytes for its weights, {size.num_bytes} bytes for the KV "
        f"cache, and more for steps of max_num_seqs={config.max_num_seqs} and "
        f"max_num_batched_tokens={config.max_num_batched_tokens}"
    )


def kv_cache_dtype_of(name: str, dtype: str, device: str) -> torch.dtype:
    """Return the dtype that ``kv_cache_dtype`` of :class:`LLM` names.

    Raises:
        RequestError: the device does not have it together with ``dtype``.
    """
    default = Precision.of(dtype, device).kv_cache_dtype
    quantized = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "int4": torch.uint8}
    found: torch.dtype = default if name == "auto" else quantized.get(name) or getattr(torch, name)
    if device != "cpu" and found not in (default, *quantized.values()):
        raise RequestError(
            f"kv_cache_dtype must be auto, int8, fp8 or int4 on device {device!r} with this dtype, got {name!r}"
        )
    return found
