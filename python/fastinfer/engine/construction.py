"""Construction of an engine's parts from its configuration and its models."""

import hashlib
import sys
from collections.abc import Sequence as List
from pathlib import Path

import torch

from fastinfer import _C, __version__
from fastinfer.engine.batch_inputs import BatchInputs
from fastinfer.engine.block_store import HostBlockStore
from fastinfer.engine.config import EngineConfig
from fastinfer.engine.disk_block_store import DiskBlockStore
from fastinfer.engine.draft_model import DraftModelSpeculator
from fastinfer.engine.kv_cache_size import KVCacheSize, choose_kv_cache_size
from fastinfer.engine.kv_offloading import KVOffloading
from fastinfer.engine.runner import Runner
from fastinfer.engine.sampler import Sampler
from fastinfer.engine.speculation import NgramSpeculator, Speculator
from fastinfer.errors import RequestError
from fastinfer.models import Model
from fastinfer.models.config import ModelConfig
from fastinfer.models.kv_cache import KVCache, num_blocks_for, token_bytes
from fastinfer.tokenizers.tokenizer import Tokenizer


def kv_cache_size(config: EngineConfig, models: List[ModelConfig], weight_bytes: int = 0) -> KVCacheSize:
    """Choose the size of the KV caches and the longest sequence; every model gets a cache of this many blocks.

    Args:
        config: configuration of the engine.
        models: configurations of the model and of the draft model, if there is one.
        weight_bytes: size of the weights that are still to be loaded.

    Raises:
        RequestError: the caches do not fit into memory, or ``max_model_len`` does not fit into a cache or exceeds the
            model's limit.
    """
    tokens = [token_bytes(m.num_layers, m.num_kv_heads, m.head_dim, config.kv_cache_dtype) for m in models]
    return choose_kv_cache_size(config, models[0].max_position, sum(tokens), weight_bytes)


def make_kv_cache(config: EngineConfig, model: Model, num_blocks: int) -> KVCache:
    """Make the KV cache of one model; its memory is uninitialised."""
    sizes = model.config
    return KVCache.empty(
        sizes.num_layers,
        num_blocks,
        config.block_size,
        sizes.num_kv_heads,
        sizes.head_dim,
        config.kv_cache_dtype,
        config.device,
    )


def make_offloading(
    config: EngineConfig, models: List[ModelConfig], kv_caches: List[KVCache], fingerprint: str
) -> KVOffloading | None:
    """Make the stores of blocks beyond the KV cache; ``None`` if the configuration has none.

    Args:
        config: configuration of the engine.
        models: configurations of the model and of the draft model, if there is one.
        kv_caches: their KV caches.
        fingerprint: identity of the models' weights and precision.

    Raises:
        RequestError: a store is too small for a block, the folder cannot be written to, or the fingerprint is missing.
    """
    block_bytes = sum(row.shape[1] for cache in kv_caches for row in cache.rows)
    host, disk = None, None
    if config.kv_offloading_size is not None:
        size = _store_bytes("kv_offloading_size", config.kv_offloading_size, block_bytes)
        host = HostBlockStore(size, block_bytes)
    if config.kv_offloading_dir is not None:
        if not fingerprint:
            raise RequestError("kv_offloading_dir needs the fingerprint of the models, got none")
        size = _store_bytes("kv_offloading_dir_size", config.kv_offloading_dir_size, block_bytes)
        full = _fingerprint_of_blocks(config, models, fingerprint)
        disk = DiskBlockStore(Path(config.kv_offloading_dir), full, size, block_bytes)
    if host is None and disk is None:
        return None
    return KVOffloading(list(kv_caches), host, disk, max(1, config.max_num_batched_tokens // config.block_size))


def _store_bytes(name: str, gib: float, block_bytes: int) -> int:
    """Return the size of a store in bytes."""
    size = int(gib * 2**30)
    if size < block_bytes:
        raise RequestError(f"{name} must hold at least one block of {block_bytes} bytes, got {gib} GiB")
    return size


def _fingerprint_of_blocks(config: EngineConfig, models: List[ModelConfig], fingerprint: str) -> bytes:
    """Return a hash of everything on which the bytes of a block depend, apart from its tokens and its adapter."""
    is_cpu = torch.device(config.device).type == "cpu"
    kernels = _C.cpu_info()["isa"] if is_cpu else torch.cuda.get_device_name(config.device)
    facts = (
        fingerprint,
        [str(model) for model in models],
        str(config.kv_cache_dtype),
        config.block_size,
        # What decides how results are rounded.
        (__version__, torch.__version__, kernels, config.deterministic, config.max_loras > 0, str(config.lora_dtype)),
        sys.byteorder,
    )
    return hashlib.sha256(repr(facts).encode()).digest()


def make_sampler(config: EngineConfig, model: Model, tokenizer: Tokenizer) -> Sampler:
    """Make a sampler that is large enough for any step."""
    return Sampler(_max_rows(config), model.config.vocab_size, tokenizer.eos_ids)


def make_runner(
    config: EngineConfig, model: Model, kv_cache: KVCache, max_model_len: int, *, with_adapters: bool = False
) -> Runner:
    """Make a runner whose inputs are large enough for any step; on a GPU this captures its graphs."""
    inputs = BatchInputs(
        # The padding of a decode step adds one sequence per padding token.
        max_seqs=config.max_num_seqs * (1 + config.num_speculative_tokens),
        max_tokens=config.max_num_batched_tokens,
        max_logits=_max_rows(config),
        max_blocks=num_blocks_for(max_model_len, config.block_size),
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


def make_ngram_speculator(config: EngineConfig) -> Speculator | None:
    """Make a speculator that finds drafts in the text itself; ``None`` if speculation is off."""
    return NgramSpeculator(config.num_speculative_tokens) if config.num_speculative_tokens else None


def make_draft_speculator(config: EngineConfig, runner: Runner, sampler: Sampler) -> Speculator:
    """Make a speculator that draws drafts from a smaller model.

    Args:
        config: configuration of the engine.
        runner: runner of the draft model.
        sampler: sampler for the drafts; not the engine's own, as a sampler keeps the parameters of its last draw.
    """
    return DraftModelSpeculator(runner, sampler, config.num_speculative_tokens, config.max_num_batched_tokens)


def check_draft_model(config: EngineConfig, sizes: ModelConfig, draft: ModelConfig, max_model_len: int) -> None:
    """Check that a draft model fits the model that it drafts for.

    Args:
        config: configuration of the engine.
        sizes: configuration of the model.
        draft: configuration of the draft model.
        max_model_len: longest sequence in tokens.

    Raises:
        RequestError: speculation is off, the vocabularies differ, or the draft model's context is too short.
    """
    if not config.num_speculative_tokens:
        raise RequestError("a draft model needs num_speculative_tokens of at least 1, got 0")
    if draft.vocab_size != sizes.vocab_size or draft.max_position < max_model_len:
        raise RequestError(
            f"the draft model must have the vocabulary of {sizes.vocab_size} tokens and a context of at least "
            f"{max_model_len}, got {draft.vocab_size} and {draft.max_position}"
        )


def _max_rows(config: EngineConfig) -> int:
    """Return the number of rows of logits in the largest step."""
    return config.max_num_seqs + config.max_num_batched_tokens
