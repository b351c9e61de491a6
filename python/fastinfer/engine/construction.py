"""Construction of an engine's parts from its configuration and its models."""

from collections.abc import Sequence as List

from fastinfer.engine.batch_inputs import BatchInputs
from fastinfer.engine.config import EngineConfig
from fastinfer.engine.draft_model import DraftModelSpeculator
from fastinfer.engine.kv_cache_size import KVCacheSize, choose_kv_cache_size
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
    return choose_kv_cache_size(config, models[0].max_position, kv_token_bytes(config, models), weight_bytes)


def kv_token_bytes(config: EngineConfig, models: List[ModelConfig]) -> int:
    """Return the size of a token's keys and values in all layers of all models, in bytes."""
    return sum(token_bytes(m.num_layers, m.num_kv_heads, m.head_dim, config.kv_cache_dtype) for m in models)


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
