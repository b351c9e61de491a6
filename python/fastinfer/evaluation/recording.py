"""Configuration of engines that record what a model computes, to train other models on it."""

from fastinfer.engine.config import EngineConfig
from fastinfer.llm import kv_cache_dtype_of
from fastinfer.models.kv_cache import num_blocks_for

MAX_SEQS = 32


def recording_config(length: int, *, with_layers: bool = True) -> EngineConfig:
    """Return the configuration of an engine on the CPU that computes texts to record.

    Without prefix caching, each text is computed from its first token.

    Args:
        length: tokens of the longest text.
        with_layers: whether what single layers compute is recorded: Python sees that only operator by operator.
    """
    return EngineConfig(
        kv_cache_dtype=kv_cache_dtype_of("auto", "auto", "cpu"),
        max_model_len=length,
        max_num_seqs=MAX_SEQS,
        num_kv_blocks=MAX_SEQS * (num_blocks_for(length, EngineConfig.block_size) + 1),
        enable_prefix_caching=False,
        enforce_eager=with_layers,
    )
