"""Runs many requests at the same time: every step is schedule, run, sample, update."""

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fastinfer.checks import INT32_MAX, INT64_MAX, check_int
from fastinfer.engine.kv_cache import KVCache, KVCacheTensors, available_memory, default_num_blocks, num_blocks_for
from fastinfer.engine.request import Request
from fastinfer.engine.runner import Runner
from fastinfer.engine.sampler import SampledToken, Sampler
from fastinfer.engine.scheduler import Chunk, Scheduler
from fastinfer.engine.sequence import Sequence
from fastinfer.errors import RequestError
from fastinfer.outputs import RequestOutput
from fastinfer.sampling_params import SamplingParams
from fastinfer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from fastinfer.models import Model


@dataclass(frozen=True)
class EngineConfig:
    """Limits of an engine.

    Attributes:
        max_model_len: longest sequence, prompt and generated tokens together; ``None`` for the model's own limit.
        max_num_seqs: requests that run at the same time; the others wait.
        max_num_batched_tokens: tokens computed per step. Longer prompts are processed in several steps, between which
            the other requests get their next tokens.
        block_size: tokens per block of the KV cache.
        kv_cache_dtype: of the cached keys and values.
        kv_cache_memory: size of the KV cache in bytes; ``None`` for what ``max_num_seqs`` requests of usual length
            need, at most a quarter of the memory available.
        num_kv_blocks: size of the KV cache in blocks, in place of ``kv_cache_memory``.
        device: where the model is: ``"cpu"`` or ``"cuda"``.
        enforce_eager: run decode steps operator by operator too, instead of replaying recorded graphs.
    """

    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    block_size: int = 32
    kv_cache_dtype: torch.dtype = torch.bfloat16
    kv_cache_memory: int | None = None
    num_kv_blocks: int | None = None
    device: str = "cpu"
    enforce_eager: bool = False

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size"):
            check_int(name, getattr(self, name), 1, INT32_MAX)
        for name in ("max_model_len", "kv_cache_memory", "num_kv_blocks"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 1, INT64_MAX)


@dataclass(frozen=True)
class EngineStats:
    """A moment's load: requests, cache blocks, and preemptions since the start."""

    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_used_blocks: int
    num_preemptions: int


class Engine:
    """Owns the cache and the queues. Not thread-safe: one thread at a time may call it.

    Errors: what goes wrong in one request's own processing (its text, its stop strings) ends that request with the
    finish reason ``"error"``. If the model or the sampler fails, :meth:`step` raises and no request has moved: the
    caller aborts them, or steps again.
    """

    def __init__(self, model: "Model", tokenizer: Tokenizer, config: EngineConfig | None = None) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.config = config = config or EngineConfig()
        self.max_model_len = config.max_model_len or model.config.max_position
        if self.max_model_len > model.config.max_position:
            raise RequestError(
                f"max_model_len must be at most the model's {model.config.max_position}, got {self.max_model_len}"
            )
        num_blocks = self._choose_num_blocks()
        self.kv_cache = KVCache(num_blocks, config.block_size)
        self.kv_cache_tensors = KVCacheTensors.empty(
            model.config.num_layers,
            num_blocks,
            config.block_size,
            model.config.num_kv_heads,
            model.config.head_dim,
            config.kv_cache_dtype,
            config.device,
        )
        self.scheduler = Scheduler(self.kv_cache, config.max_num_seqs, config.max_num_batched_tokens)
        self.sampler = Sampler(config.max_num_seqs)
        self.runner = Runner(
            model,
            self.sampler,
            self.kv_cache_tensors,
            block_size=config.block_size,
            max_blocks=num_blocks_for(self.max_model_len, config.block_size),
            max_num_seqs=config.max_num_seqs,
            device=config.device,
            enforce_eager=config.enforce_eager,
        )
        self._requests: dict[str, Request] = {}
        self._num_added = 0

    def validate(self, prompt_token_ids: list[int], params: SamplingParams) -> None:
        """Raise RequestError if the request can never be served."""
        if not isinstance(prompt_token_ids, list):
            raise RequestError(f"prompt_token_ids must be a list, got {type(prompt_token_ids).__name__}")
        if not prompt_token_ids:
            raise RequestError("prompt must have at least 1 token, got 0")
        # One more, as at least one token is generated.
        if len(prompt_token_ids) + 1 > self.max_model_len:
            raise RequestError(
                f"prompt must be shorter than max_model_len={self.max_model_len} tokens, got {len(prompt_token_ids)}"
            )
        for token_id in prompt_token_ids:
            check_int("prompt_token_ids", token_id, 0, self.model.config.vocab_size - 1)
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params must be SamplingParams, got {type(params).__name__}")

    def add_request(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams | None = None,
        *,
        prompt: str | None = None,
        request_id: str | None = None,
    ) -> str:
        """Queue a request and return its id; the next steps work on it.

        Args:
            prompt_token_ids: ids within the model's vocabulary.
            params: defaults to ``SamplingParams()``.
            prompt: the prompt as text, handed through to the outputs.
            request_id: must not be that of an unfinished request; by default a number is given.

        Raises:
            RequestError: the request can never be served, or its id is taken.
        """
        params = params or SamplingParams()
        self.validate(prompt_token_ids, params)
        if request_id is None:
            request_id = f"request-{self._num_added}"
        if request_id in self._requests:
            raise RequestError(f"request_id must be new, got {request_id!r}, which is still running")
        self._num_added += 1
        seed = secrets.randbits(63) if params.seed is None else params.seed
        sequence = Sequence(request_id, prompt_token_ids, params, seed)
        self._requests[request_id] = Request(sequence, prompt, self.tokenizer, self.max_model_len)
        self.scheduler.add(sequence)
        return request_id

    @torch.inference_mode()
    def step(self) -> list[RequestOutput]:
        """Compute the next tokens, and return the outputs of the requests that got one."""
        chunks = self.scheduler.schedule()
        if not chunks:
            return []
        complete = [chunk.sequence for chunk in chunks if chunk.is_last]
        self.sampler.prepare(complete)
        logits, drawn = self.runner(chunks)
        return self._update(chunks, complete, self.sampler.sampled(logits, drawn))

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request and free its cache at once.

        Returns:
            Its last output, with the finish reason ``"abort"``; ``None`` for a request that is unknown or finished.
        """
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        request.finish("abort")
        self.scheduler.finish(request.sequence)
        return request.output()

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            num_free_blocks=self.kv_cache.num_free,
            num_used_blocks=self.kv_cache.num_used,
            num_preemptions=self.scheduler.num_preemptions,
        )

    def _update(self, chunks: list[Chunk], complete: list[Sequence], tokens: list[SampledToken]) -> list[RequestOutput]:
        for chunk in chunks:
            chunk.sequence.num_computed_tokens += chunk.num_tokens
        outputs = []
        for sequence, token in zip(complete, tokens, strict=True):
            request = self._requests[sequence.request_id]
            try:
                request.add(token)
            except Exception as error:  # whatever it is, the others live on
                request.finish("error", f"{type(error).__name__}: {error}")
            if request.finish_reason is not None:
                self.scheduler.finish(sequence)
                del self._requests[sequence.request_id]
            outputs.append(request.output())
        return outputs

    def _choose_num_blocks(self) -> int:
        """Blocks of the cache; at least one sequence of the greatest length must fit, or it could never be served."""
        config, model = self.config, self.model.config
        token_bytes = 2 * model.num_layers * model.num_kv_heads * model.head_dim * config.kv_cache_dtype.itemsize
        block_bytes = config.block_size * token_bytes
        available = available_memory(config.device)
        if config.num_kv_blocks is not None:
            num_blocks = config.num_kv_blocks
        elif config.kv_cache_memory is not None:
            num_blocks = config.kv_cache_memory // block_bytes
        else:
            num_blocks = default_num_blocks(
                config.block_size, block_bytes, self.max_model_len, config.max_num_seqs, available
            )
        if num_blocks * block_bytes > available:
            raise RequestError(
                f"the KV cache must fit into the {available} bytes of memory available, "
                f"got {num_blocks} blocks of {block_bytes} bytes"
            )
        needed = num_blocks_for(self.max_model_len, config.block_size)
        if num_blocks < needed:
            raise RequestError(
                f"max_model_len={self.max_model_len} needs a KV cache of {needed * block_bytes} bytes, "
                f"got {num_blocks * block_bytes}: lower max_model_len or raise kv_cache_memory"
            )
        return num_blocks
