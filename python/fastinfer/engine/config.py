"""Configuration of an engine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from os import PathLike

import torch

from fastinfer.errors import RequestError
from fastinfer.parallel.division import LAYOUTS, Layout
from fastinfer.parallel.group import MAX_RANKS
from fastinfer.utils.checks import INT32_MAX, INT64_MAX, check_bool, check_float, check_int, check_path, show
from fastinfer.utils.device_name import is_device_name
from fastinfer.utils.host_memory import host_memory
from fastinfer.utils.places import Place

REQUEST_LIMITS = (
    "max_stop_strings",
    "max_stop_string_length",
    "max_stop_token_ids",
    "max_bad_words",
    "max_logit_bias",
)
KV_CACHE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn, torch.uint8)
MAX_SPECULATIVE_TOKENS = 15
# Blocks that a step has room for, where chunks of prompts end with a block: at least a quarter of the tokens are for
# prompts, and half of that is for the first one.
MIN_STEP_BLOCKS = 8
MAX_GIB = 2.0**30
# Values of options that a model does not support otherwise if it is not on one device of one process: with tensor
# parallelism on GPUs, with pipeline parallelism, and with layers on several devices.
ON_GPUS = {
    "tensor_parallel_layout": ("reduce",),
    "async_scheduling": (None, False),
    "kv_offloading_size": (None,),
    "kv_offloading_dir": (None,),
    "sparse_attention": (None,),
}
STAGED = {"device": ("cpu",), "tensor_parallel_layout": ("gather",), "async_scheduling": (False, None)}
PLACED = {"tensor_parallel_size": (1,), "pipeline_parallel_size": (1,), "sparse_attention": (None,)}
# Defaults by type of device. A GPU reads its weights faster than 64 sequences use them.
MAX_NUM_SEQS = {"cpu": 64, "cuda": 256}
MAX_NUM_BATCHED_TOKENS = {"cpu": 512, "cuda": 2048}


@dataclass(frozen=True)
class EngineConfig:
    """Limits and options of an engine.

    Attributes:
        max_model_len: longest sequence in tokens, prompt and generated tokens together; ``None`` for the model's own
            limit, or for what fits into the KV cache if that is less.
        max_num_seqs: maximum number of running sequences; the others wait.
        max_num_batched_tokens: maximum number of tokens per step. Longer prompts are computed in several steps, in
            which the other requests still get their next tokens, and shorter prompts their first ones. If it is less
            than ``max_num_seqs``, decoding sequences take turns.
        max_num_waiting: maximum number of waiting requests; further ones are refused.
        max_num_waiting_tokens: maximum number of tokens of the waiting requests; a request with which they would have
            more is refused, unless it is the only one. ``None`` for no limit.
        max_stop_strings: maximum number of a request's stop strings. A request that exceeds this or one of the next
            four limits is refused: what it asks for costs time in each step, which all other requests share.
        max_stop_string_length: maximum length of a stop string in characters.
        max_stop_token_ids: maximum number of a request's ``stop_token_ids``.
        max_bad_words: maximum number of a request's ``bad_words``.
        max_logit_bias: maximum number of tokens in a request's ``logit_bias``.
        block_size: tokens per block of the KV cache.
        kv_cache_dtype: dtype of the cached keys and values. fp32, bf16 and fp16 are stored as they are; int8 and
            float8_e4m3fn have one scale per token and head; uint8 stands for int4, with a scale and a minimum for every
            16 elements of a key and every 64 elements of a value.
        kv_cache_memory: size of the KV cache in bytes. ``None`` on a CPU: as much as ``max_num_seqs`` requests of
            typical length need, or one of the longest, but at most half of the available memory that weights and
            ``kv_offloading_size`` leave. ``None`` on a GPU: what ``gpu_memory_utilization`` allows.
        gpu_memory_utilization: share of a GPU's memory that weights and KV cache may use together.
        num_kv_blocks: size of the KV cache in blocks; overrides ``kv_cache_memory``. Beside layers without an attention
            window, those with one get as many or fewer.
        enable_prefix_caching: whether requests reuse the cached keys and values of earlier requests that begin with the
            same tokens.
        kv_offloading_size: size in GiB of a store in host memory for blocks that leave the prefix cache, from which
            later requests load them; ``None`` for no such store. At most the memory of the host, or of its container;
            on a CPU at most what is available beside the weights and the KV cache. Blocks of a GPU are in pinned
            memory, where each takes a power of two bytes, so the store may hold little more than half its size.
        kv_offloading_dir: folder in which computed blocks are kept, so that a later process need not compute them
            again; ``None`` for no such folder. Several processes may share it. The files tell what the prompts were:
            only their owner may read them, and they are not encrypted.
        kv_offloading_dir_size: largest size of that folder in GiB, beside the block that each process is just
            writing; the blocks that were not used for longest go first.
        num_speculative_tokens: maximum number of draft tokens per sequence and step; 0 for no speculation. If all
            sequences decode, a step with drafts has at most four tokens or a multiple of four, so 3 and 7 are good
            values for a single sequence. Drafts do not change the text, see :mod:`fastinfer.engine.speculation`.
        sparse_attention: share of its attention, as 0.9, that the blocks hold which a token attends to, for each KV
            head: the first block, the last two, and those with the largest estimates. ``None`` for all blocks. The
            first two layers, layers with a window, tokens with little before them, and on a GPU prompts attend to all
            in any case. On a CPU generated tokens attend to the other blocks by keys and values in four bits, and
            chunks of prompts end with a block. See docs/sparse-attention.md.
        max_loras: number of LoRA adapters that can run at the same time; 0 for a model without adapters. More can be
            registered.
        max_cpu_loras: number of LoRA adapters that are kept in host memory, so that they are not read again when their
            slot was given to another one; ``None`` for ``max_loras``.
        max_lora_rank: maximum rank of a LoRA adapter.
        lora_dtype: dtype of the LoRA adapters' matrices.
        deterministic: whether a request's text must depend on the request alone. On a CPU this is always the case, with
            two exceptions: 16-bit hidden states together with requests that use LoRA adapters; and, on a CPU with
            AVX-512 BF16 or AMX alone, prompts that repeat a generated text, as those of a chat do. By default these
            reuse what was cached while it was generated, see :mod:`fastinfer.engine.roles`. On a GPU, steps run under
            :func:`fastinfer.ops.batch_invariant`, which is slower.
        device: device of the model, ``"cpu"``, ``"cuda"`` or, with the number of a GPU, ``"cuda:N"``.
        places: places of the model's layers, if they are on several devices of this process, or their experts on
            another one; empty for a model on ``device`` alone. ``device`` is that of the first place. See
            docs/placement.md.
        async_scheduling: whether a step is launched before the results of the last one are known, so that the device
            need not wait for Python. ``None``: on one GPU. A step waits all the same if it needs those results: with
            grammars, penalties, logits processors, log-probabilities, beams, and with speculation.
        enforce_eager: whether all steps run operator by operator instead of replaying recorded graphs.
        tensor_parallel_size: number of processes that compute the model together, each with a part of every weight.
            On GPUs, process i is on the GPU whose number is i more than that of ``device``, the layout is ``"reduce"``,
            no step is launched ahead, and there are no stores of blocks beyond the KV cache.
        tensor_parallel_layout: ``"gather"`` for results that are bitwise those of one process. With ``"reduce"`` the
            processes exchange half as often and add parts of sums, so that results differ by rounding, but are the same
            in every run and in every batch; without LoRA adapters.
        pipeline_parallel_size: number of stages, processes that compute the model together, each some of its layers;
            with ``tensor_parallel_size`` as many processes for each stage. On a CPU alone, without
            ``async_scheduling``.
        pipeline_parallel_layers: number of layers of each stage, from the first one on; ``None`` to divide them by the
            number of weights that a token uses, the output layer included.
    """

    max_model_len: int | None = None
    max_num_seqs: int = MAX_NUM_SEQS["cpu"]
    max_num_batched_tokens: int = MAX_NUM_BATCHED_TOKENS["cpu"]
    max_num_waiting: int = 10_000
    max_num_waiting_tokens: int | None = None
    max_stop_strings: int = 32
    max_stop_string_length: int = 256
    max_stop_token_ids: int = 128
    max_bad_words: int = 64
    max_logit_bias: int = 300
    block_size: int = 32
    kv_cache_dtype: torch.dtype = torch.bfloat16
    kv_cache_memory: int | None = None
    gpu_memory_utilization: float = 0.9
    num_kv_blocks: int | None = None
    enable_prefix_caching: bool = True
    kv_offloading_size: float | None = None
    kv_offloading_dir: str | PathLike[str] | None = None
    kv_offloading_dir_size: float = 16.0
    num_speculative_tokens: int = 0
    sparse_attention: float | None = None
    max_loras: int = 0
    max_cpu_loras: int | None = None
    max_lora_rank: int = 64
    lora_dtype: torch.dtype = torch.bfloat16
    deterministic: bool = False
    device: str = "cpu"
    places: tuple[Place, ...] = ()
    async_scheduling: bool | None = None
    enforce_eager: bool = False
    tensor_parallel_size: int = 1
    tensor_parallel_layout: Layout = "gather"
    pipeline_parallel_size: int = 1
    pipeline_parallel_layers: Sequence[int] | None = None

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size"):
            check_int(name, getattr(self, name), 1, INT32_MAX)
        for name in ("max_model_len", "max_num_waiting_tokens", "kv_cache_memory", "num_kv_blocks"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 1, INT64_MAX)
        check_int("max_num_waiting", self.max_num_waiting, 1, INT32_MAX)
        for name in REQUEST_LIMITS:
            check_int(name, getattr(self, name), 0, INT32_MAX)
        if self.sparse_attention is not None:
            check_float("sparse_attention", self.sparse_attention, 0.0, 1.0, low_open=True)
            least = MIN_STEP_BLOCKS * self.chunk_multiple
            if self.max_num_batched_tokens < least:
                raise RequestError(
                    f"max_num_batched_tokens must be at least {least}, {MIN_STEP_BLOCKS} blocks, with "
                    f"sparse_attention, got {self.max_num_batched_tokens}"
                )
        check_int("num_speculative_tokens", self.num_speculative_tokens, 0, MAX_SPECULATIVE_TOKENS)
        check_int("max_loras", self.max_loras, 0, 1024)
        if self.max_cpu_loras is not None:
            check_int("max_cpu_loras", self.max_cpu_loras, 1, INT32_MAX)
        check_int("max_lora_rank", self.max_lora_rank, 1, 4096)
        if self.kv_offloading_size is not None:
            check_float("kv_offloading_size", self.kv_offloading_size, 0.0, MAX_GIB, low_open=True)
            gib = host_memory().total / 2**30
            if self.kv_offloading_size > gib:
                raise RequestError(
                    f"kv_offloading_size must be at most the host's {gib:.1f} GiB of memory, "
                    f"got {self.kv_offloading_size}"
                )
        if self.kv_offloading_dir is not None:
            check_path("kv_offloading_dir", self.kv_offloading_dir)
        check_float("kv_offloading_dir_size", self.kv_offloading_dir_size, 0.0, MAX_GIB, low_open=True)
        if not self.enable_prefix_caching and self.has_offloading:
            raise RequestError("kv_offloading_size and kv_offloading_dir need enable_prefix_caching=True, got False")
        check_float("gpu_memory_utilization", self.gpu_memory_utilization, 0.01, 1.0)
        for field in fields(self):
            if field.type is bool:
                check_bool(field.name, getattr(self, field.name))
        if self.async_scheduling is not None:
            check_bool("async_scheduling", self.async_scheduling)
        if not is_device_name(self.device) or self.device == "auto":
            raise RequestError(f"device must be cpu, cuda or cuda:N, got {show(self.device)}")
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise RequestError(f"kv_cache_dtype must be one of {KV_CACHE_DTYPES}, got {self.kv_cache_dtype!r}")
        if self.places:
            if self.places[0].device != self.device:
                raise RequestError(f"device must be that of the first place, got {self.device} and {self.places[0]}")
            self._check_supported(PLACED, "a model on several devices")
        check_int("tensor_parallel_size", self.tensor_parallel_size, 1, MAX_RANKS)
        if self.tensor_parallel_size > 1 and self.device != "cpu":
            self._check_supported(ON_GPUS, f"tensor_parallel_size={self.tensor_parallel_size} on GPUs")
        if self.tensor_parallel_layout not in LAYOUTS:
            raise RequestError(
                f"tensor_parallel_layout must be one of {LAYOUTS}, got {show(self.tensor_parallel_layout)}"
            )
        if self.tensor_parallel_layout == "reduce" and self.max_loras:
            raise RequestError(f"max_loras must be 0 with tensor_parallel_layout='reduce', got {self.max_loras}")
        check_int("pipeline_parallel_size", self.pipeline_parallel_size, 1, MAX_RANKS)
        if self.pipeline_parallel_size > 1:
            self._check_supported(STAGED, f"pipeline_parallel_size={self.pipeline_parallel_size}")
        if self.pipeline_parallel_layers is not None:
            self._check_stages(self.pipeline_parallel_layers)
        if self.tensor_parallel_layout == "reduce" and self.tensor_parallel_size == 1:
            raise RequestError("tensor_parallel_layout='reduce' needs a tensor_parallel_size of at least 2, got 1")
        if self.num_ranks > MAX_RANKS:
            raise RequestError(
                f"tensor_parallel_size * pipeline_parallel_size must be at most {MAX_RANKS}, got {self.num_ranks}"
            )

    def _check_stages(self, lengths: object) -> None:
        """Check that each stage has a number of layers."""
        name, count = "pipeline_parallel_layers", self.pipeline_parallel_size
        if not isinstance(lengths, list | tuple) or len(lengths) != count:
            raise RequestError(f"{name} must be a list of pipeline_parallel_size={count} integers, got {show(lengths)}")
        for length in lengths:
            check_int(name, length, 1, INT32_MAX)

    def _check_supported(self, supported: Mapping[str, tuple[object, ...]], feature: str) -> None:
        """Check that options have values that a feature supports."""
        for name, values in supported.items():
            if (value := getattr(self, name)) not in values:
                raise RequestError(f"{name} must be {values[0]} with {feature}, got {show(value)}")

    @property
    def num_ranks(self) -> int:
        """Number of processes that compute the model together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def device_of(self, rank: int) -> str:
        """Return the device of a process, see ``tensor_parallel_size``."""
        return "cpu" if self.device == "cpu" else f"cuda:{(torch.device(self.device).index or 0) + rank}"

    @property
    def devices(self) -> frozenset[str]:
        """All devices of the model."""
        return frozenset([self.device, *(device for place in self.places for device in place.devices)])

    @property
    def runs_ahead(self) -> bool:
        """Whether steps are launched ahead, see ``async_scheduling``."""
        if self.async_scheduling is not None:
            return self.async_scheduling
        # A launch waits for what a CPU computes. Of several GPUs, only that of rank 0 knows all drawn tokens.
        return "cpu" not in self.devices and self.num_ranks == 1

    @property
    def has_offloading(self) -> bool:
        """Whether there are stores of blocks beyond the KV cache."""
        return self.kv_offloading_size is not None or self.kv_offloading_dir is not None

    @property
    def sparse_prompts(self) -> bool:
        """Whether tokens of prompts attend to chosen blocks, too: those of one block choose together."""
        return self.sparse_attention is not None and self.device == "cpu"

    @property
    def chunk_multiple(self) -> int:
        """Number whose multiples the chunks of a prompt end at."""
        return self.block_size if self.sparse_prompts else 1

    @property
    def max_num_rows(self) -> int:
        """Number of rows of logits in the largest step."""
        return self.max_num_seqs + self.max_num_batched_tokens
