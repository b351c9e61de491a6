"""Limits and choices of an engine."""

from dataclasses import dataclass, fields

import torch

from fastinfer.engine.admission import AdmissionPolicy, Continuous, Dynamic, Static
from fastinfer.errors import RequestError
from fastinfer.utils.checks import INT32_MAX, INT64_MAX, check_bool, check_float, check_int

BATCHING = ("continuous", "static", "dynamic")
KV_CACHE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn, torch.uint8)
MAX_SPECULATIVE_TOKENS = 15


@dataclass(frozen=True)
class EngineConfig:
    """Limits and choices of an engine.

    Attributes:
        max_model_len: longest sequence, prompt and generated tokens together; ``None`` for the model's own limit.
        max_num_seqs: sequences that run at the same time; the others wait.
        max_num_batched_tokens: tokens computed per step. Longer prompts are processed in several steps, in which the
            other requests get their next tokens.
        max_num_waiting: requests that may wait; more are refused.
        batching: ``"continuous"``; or, to compare it with, ``"static"`` (a batch of all that waits runs to its end) or
            ``"dynamic"`` (likewise, and it waits until ``max_num_seqs`` or ``max_num_batched_tokens`` of prompts have
            come, or its first member has waited ``max_batch_wait_s``).
        max_batch_wait_s: see ``batching``.
        block_size: tokens per block of the KV cache.
        kv_cache_dtype: of the cached keys and values: fp32, bf16, fp16; or int8 or float8_e4m3fn, with a scale for each
            token and head; or uint8, which stands for int4, with a scale and a minimum for 16 elements of a key and
            for 64 of a value.
        kv_cache_memory: size of the KV cache in bytes; ``None`` for what ``max_num_seqs`` requests of usual length
            need, at most a quarter of the memory available.
        num_kv_blocks: size of the KV cache in blocks, in place of ``kv_cache_memory``.
        enable_prefix_caching: keep what is computed for later requests that begin with the same tokens.
        num_speculative_tokens: guess so many tokens ahead at most, and verify them in one step; 0 for none. A step of
            sequences that all decode gets drafts up to four tokens or a multiple of four, so that 3 and 7 are good
            numbers for one alone. The text stays the same; see
            :mod:`fastinfer.engine.speculation`.
        max_loras: LoRA adapters that can be loaded at the same time.
        max_lora_rank: largest rank of one.
        lora_dtype: of their matrices.
        deterministic: a request's text depends on nothing but the request. On the CPU that is always so, but for 16-bit
            hidden states beside requests with LoRA adapters; on a GPU steps are computed under
            :func:`fastinfer.ops.batch_invariant`, which costs speed.
        device: where the model is: ``"cpu"`` or ``"cuda"``.
        enforce_eager: run all steps operator by operator, instead of replaying recorded graphs.
    """

    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_num_waiting: int = 10_000
    batching: str = "continuous"
    max_batch_wait_s: float = 0.05
    block_size: int = 32
    kv_cache_dtype: torch.dtype = torch.bfloat16
    kv_cache_memory: int | None = None
    num_kv_blocks: int | None = None
    enable_prefix_caching: bool = True
    num_speculative_tokens: int = 0
    max_loras: int = 0
    max_lora_rank: int = 64
    lora_dtype: torch.dtype = torch.bfloat16
    deterministic: bool = False
    device: str = "cpu"
    enforce_eager: bool = False

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size"):
            check_int(name, getattr(self, name), 1, INT32_MAX)
        for name in ("max_model_len", "kv_cache_memory", "num_kv_blocks"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 1, INT64_MAX)
        check_int("max_num_waiting", self.max_num_waiting, 1, INT32_MAX)
        check_int("num_speculative_tokens", self.num_speculative_tokens, 0, MAX_SPECULATIVE_TOKENS)
        check_int("max_loras", self.max_loras, 0, 1024)
        check_int("max_lora_rank", self.max_lora_rank, 1, 4096)
        check_float("max_batch_wait_s", self.max_batch_wait_s, 0.0, 3600.0)
        for field in fields(self):
            if field.type is bool:
                check_bool(field.name, getattr(self, field.name))
        if self.batching not in BATCHING:
            raise RequestError(f"batching must be one of {', '.join(BATCHING)}, got {self.batching!r}")
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise RequestError(f"kv_cache_dtype must be one of {KV_CACHE_DTYPES}, got {self.kv_cache_dtype!r}")

    def make_admission_policy(self) -> AdmissionPolicy:
        if self.batching == "static":
            return Static(self.max_num_seqs)
        if self.batching == "dynamic":
            return Dynamic(self.max_num_seqs, self.max_num_batched_tokens, self.max_batch_wait_s)
        return Continuous()
