"""Construction of an engine's parts from its configuration and its models."""

import hashlib
import sys
from collections import Counter
from collections.abc import Sequence as List
from pathlib import Path

import torch

from fastinfer import _C, __version__
from fastinfer.engine.block_manager import BlockManager
from fastinfer.engine.block_pool import BlockPool
from fastinfer.engine.block_speculator import BlockSpeculator
from fastinfer.engine.block_store import HostBlockStore
from fastinfer.engine.cache_sizes import cache_sizes
from fastinfer.engine.config import EngineConfig
from fastinfer.engine.disk_block_store import DiskBlockStore
from fastinfer.engine.draft_model import DraftModelSpeculator
from fastinfer.engine.head_speculator import HeadSpeculator
from fastinfer.engine.kv_cache_size import TYPICAL_TOKENS, KVCacheSize, Room, choose_kv_cache_size
from fastinfer.engine.kv_offloading import KVOffloading
from fastinfer.engine.sampler import Sampler
from fastinfer.engine.speculation import NgramSpeculator, Speculator
from fastinfer.engine.state_manager import StateManager
from fastinfer.engine.transfer import pinned_bytes
from fastinfer.engine.worker import CachePart, Worker
from fastinfer.errors import RequestError
from fastinfer.models import Model
from fastinfer.models.config import ModelConfig
from fastinfer.models.kv_cache import QUANTIZED_DTYPES
from fastinfer.models.sparse_attention import DENSE_LAYERS, has_key_codes
from fastinfer.tokenizers.tokenizer import Tokenizer

# Of latents and of rotated elements in the kernels of a GPU, see fastinfer.ops.paged_attention.
GPU_LATENT_SIZES = ((256, 64), (512, 64))
MAX_GPU_INDEX_DIM = 128  # see fastinfer.ops.select_tokens


def kv_cache_size(
    config: EngineConfig,
    models: List[ModelConfig],
    room: Room | None = None,
    typical_tokens: int = TYPICAL_TOKENS,
) -> KVCacheSize:
    """Choose the size of the KV caches and the longest sequence; every model gets a cache of this many blocks.

    Layers with the same window form a group. A window that is no shorter than any sequence is as good as none. A draft
    model uses the block numbers of the model, whatever its own windows are, and a block in a store beyond the cache has
    the keys and values of all layers: with either, all layers form one group, and no block is given back before the
    sequence ends.

    Args:
        config: configuration of the engine.
        models: configurations of the model and of the draft model, if there is one.
        room, typical_tokens: see :func:`fastinfer.engine.kv_cache_size.choose_kv_cache_size`.

    Raises:
        RequestError: the caches do not fit into memory, ``max_model_len`` does not fit into a cache or exceeds the
            model's limit, the draft model has layers with states, or an option is on that latent attention does not
            support.
    """
    if any(model.states is not None for model in models[1:]):
        raise RequestError(
            "the draft model must have full attention in all layers, got a model whose layers have states"
        )
    if any(model.latent_attention is not None for model in models):
        check_latent_attention(config, models)
    if config.sparse_attention is not None:
        check_sparse_attention(config, models[0])
    limit = models[0].max_position
    groups: Counter[int] = Counter()
    states = 0
    for layer in cache_sizes(config, models):
        if layer.window is None:
            states += layer.num_bytes
        else:
            groups[layer.window] += layer.num_bytes
    return choose_kv_cache_size(config, limit, groups, states, room, typical_tokens)


def check_latent_attention(config: EngineConfig, models: List[ModelConfig]) -> None:
    """Check that no option is on that latent attention does not support.

    Args:
        config: configuration of the engine.
        models: configurations of the model and of the draft model, if there is one; one of them has latent attention.

    Raises:
        RequestError: a GPU does not support the sizes or the dtype of the cache.
    """
    device = next((device for device in sorted(config.devices) if device != "cpu"), None)
    if device is None:
        return
    if config.kv_cache_dtype in QUANTIZED_DTYPES:
        raise RequestError(
            f"kv_cache_dtype must be auto, bfloat16 or float16 for a model with latent attention on device "
            f"{device!r}, got {config.kv_cache_dtype}"
        )
    for sizes in (model.latent_attention for model in models):
        if sizes is not None and (sizes.rank, sizes.rotary_dim) not in GPU_LATENT_SIZES:
            raise RequestError(
                f"on device {device!r} latents and rotated elements must have one of the sizes "
                f"{GPU_LATENT_SIZES}, got {(sizes.rank, sizes.rotary_dim)}"
            )
    for indexer in (model.indexer for model in models):
        if indexer is not None and (indexer.head_dim % 8 or indexer.head_dim > MAX_GPU_INDEX_DIM):
            raise RequestError(
                f"on device {device!r} the heads of indexers must have a multiple of 8 and at most {MAX_GPU_INDEX_DIM} "
                f"elements, got {indexer.head_dim}"
            )


def check_sparse_attention(config: EngineConfig, model: ModelConfig) -> None:
    """Check that a model can have sparse attention.

    Args:
        config: configuration of the engine.
        model: configuration of the model.

    Raises:
        RequestError: no layer can have sparse attention, or ranks share a KV head.
    """
    shapes = [model.kv_shape(layer) for layer in range(model.num_layers) if has_key_codes(model, layer)]
    sizes = {shape.head_dim for shape in shapes}
    if not shapes:
        raise RequestError(
            f"sparse_attention needs layers with full attention after the first {DENSE_LAYERS}, got a model without"
        )
    if any(size % 8 for size in sizes):
        raise RequestError(f"sparse_attention needs a head_dim that is a multiple of 8, got {sorted(sizes)}")
    # Of which the query heads choose pages together.
    num_heads, num_ranks = min(shape.num_heads for shape in shapes), config.tensor_parallel_size
    if num_ranks > num_heads:
        raise RequestError(f"sparse_attention needs a KV head for each rank, got {num_heads} for {num_ranks} ranks")


def make_block_manager(
    config: EngineConfig, size: KVCacheSize, offloading: KVOffloading | None, *, separates_roles: bool
) -> BlockManager:
    """Make a manager of the blocks of KV caches of this size, which shares blocks across roles or not."""
    pools = [BlockPool(*numbers) for numbers in zip(size.num_blocks, size.windows, strict=True)]
    block_size, caches = config.block_size, config.enable_prefix_caching
    states = StateManager(size.num_states, block_size, enable_prefix_caching=caches) if size.num_states else None
    return BlockManager(pools, block_size, caches, offloading, separates_roles=separates_roles, states=states)


def make_offloading(config: EngineConfig, workers: List[Worker], fingerprint: str) -> KVOffloading | None:
    """Make the stores of blocks beyond the KV cache; ``None`` if the configuration has none.

    Args:
        config: configuration of the engine.
        workers: workers of the model and of the draft model, if there is one.
        fingerprint: see :func:`fingerprint_of_blocks`.

    Raises:
        RequestError: a store is too small for a block or a snapshot of states, the folder cannot be written to, or the
            fingerprint is missing.
    """
    if not config.has_offloading:
        return None
    block_bytes = sum(worker.part_bytes(CachePart.BLOCK) for worker in workers)
    block_bytes = max(block_bytes, workers[0].part_bytes(CachePart.STATES))
    host, disk = None, None
    if config.kv_offloading_size is not None:
        is_cpu = torch.device(config.device).type == "cpu"
        needed = block_bytes if is_cpu else pinned_bytes(block_bytes)
        host = HostBlockStore(_store_bytes("kv_offloading_size", config.kv_offloading_size, needed))
    if config.kv_offloading_dir is not None:
        if not fingerprint:
            raise RequestError("kv_offloading_dir needs the fingerprint of the models, got none")
        size = _store_bytes("kv_offloading_dir_size", config.kv_offloading_dir_size, block_bytes)
        disk = DiskBlockStore(Path(config.kv_offloading_dir), bytes.fromhex(fingerprint), size)
    return KVOffloading(list(workers), host, disk, max(1, config.max_num_batched_tokens // config.block_size))


def _store_bytes(name: str, gib: float, block_bytes: int) -> int:
    """Return the size of a store in bytes."""
    size = int(gib * 2**30)
    if size < block_bytes:
        raise RequestError(f"{name} must hold at least one block of {block_bytes} bytes, got {gib} GiB")
    return size


def fingerprint_of_blocks(config: EngineConfig, models: List[ModelConfig], fingerprint: str) -> str:
    """Return a hash of everything on which the bytes of a block depend, apart from its tokens and its adapter.

    Args:
        config: configuration of the engine.
        models: configurations of the model and of the draft model, if there is one.
        fingerprint: identity of the models' weights and precision; if it is empty, so is the result.
    """
    if not fingerprint:
        return ""
    is_cpu = torch.device(config.device).type == "cpu"
    kernels = _C.cpu_info()["isa"] if is_cpu else torch.cuda.get_device_name(config.device)
    facts = (
        fingerprint,
        [str(model) for model in models],
        str(config.kv_cache_dtype),
        config.block_size,
        config.sparse_attention,
        # What ranks compute together, whose parts of a block follow each other.
        (config.tensor_parallel_size, config.tensor_parallel_layout, config.pipeline_parallel_size),
        list(config.pipeline_parallel_layers or ()),
        [str(place) for place in config.places],
        # What decides how results are rounded.
        (__version__, torch.__version__, kernels, config.deterministic, config.max_loras > 0, str(config.lora_dtype)),
        sys.byteorder,
    )
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def make_sampler(config: EngineConfig, model: Model, tokenizer: Tokenizer) -> Sampler:
    """Make a sampler that is large enough for any step."""
    return Sampler(config.max_num_rows, model.config.vocab_size, tokenizer.eos_ids)


def make_speculator(
    config: EngineConfig, draft_worker: Worker | None, draft_sampler: Sampler | None
) -> Speculator | None:
    """Make what drafts tokens: the draft model if there is one, or else the text; ``None`` if speculation is off.

    Args:
        config: configuration of the engine.
        draft_worker: worker of the draft model.
        draft_sampler: sampler for its drafts; not the engine's own, as a sampler keeps the parameters of its last draw.
    """
    limit = config.num_speculative_tokens
    if draft_worker is not None and draft_sampler is not None:
        draft = draft_worker.model.config
        if draft.block is not None:
            return BlockSpeculator(draft_worker, draft_sampler, limit, config.max_num_batched_tokens, draft.block)
        kind = HeadSpeculator if draft.has_features else DraftModelSpeculator
        return kind(draft_worker, draft_sampler, limit, config.max_num_batched_tokens)
    return NgramSpeculator(limit) if limit else None


def check_draft_model(config: EngineConfig, sizes: ModelConfig, draft: ModelConfig, max_model_len: int) -> None:
    """Check that a draft model fits the model that it drafts for.

    Args:
        config: configuration of the engine.
        sizes: configuration of the model.
        draft: configuration of the draft model.
        max_model_len: longest sequence in tokens.

    Raises:
        RequestError: speculation is off, the vocabularies differ, the draft model's context is too short, or ranks
            divide the model in a way that a draft head cannot read.
    """
    if not config.num_speculative_tokens:
        raise RequestError("a draft model needs num_speculative_tokens of at least 1, got 0")
    if draft.is_draft_head and config.pipeline_parallel_size > 1:
        # It reads outputs of layers in several stages, and features of steps that may still be in flight.
        raise RequestError(f"pipeline_parallel_size must be 1 with a draft head, got {config.pipeline_parallel_size}")
    if draft.is_draft_head and config.num_ranks > 1 and config.tensor_parallel_layout == "reduce":
        # Sums of ranks overwrite the outputs of earlier layers before the head has read them.
        raise RequestError("tensor_parallel_layout must be 'gather' with a draft head, got 'reduce'")
    if draft.is_draft_head and draft.hidden_size != sizes.hidden_size:
        raise RequestError(
            f"the draft head must have the model's hidden size of {sizes.hidden_size}, got {draft.hidden_size}"
        )
    if draft.vocab_size != sizes.vocab_size or draft.max_position < max_model_len:
        raise RequestError(
            f"the draft model must have the vocabulary of {sizes.vocab_size} tokens and a context of at least "
            f"{max_model_len}, got {draft.vocab_size} and {draft.max_position}"
        )


def modules_obstacle(config: EngineConfig, models: List[ModelConfig]) -> str:
    """Return what an engine would need for prompts with modules; empty if it takes them.

    Args:
        config: configuration of the engine.
        models: configuration of the model, and of the draft model if there is one.
    """
    if not config.enable_prefix_caching:
        return "enable_prefix_caching=True, got False"
    if len(models) > 1:
        return "an engine without a draft model"
    [model] = models
    layers = range(model.num_layers)
    if any(model.has_state(layer) or model.window(layer) for layer in layers):
        return "a model whose layers all attend to the whole text, got one with attention windows or states"
    return ""
