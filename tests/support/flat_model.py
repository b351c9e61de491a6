"""A model whose steps cost the same at any length, to count what the engine itself does in a step."""

from types import SimpleNamespace

import torch
from torch import Tensor

from fastinfer.engine.config import EngineConfig
from fastinfer.engine.engine import Engine
from fastinfer.models.batch import Batch
from fastinfer.models.config import KVShape
from fastinfer.models.kv_cache import KVCache
from support.toy import ToyTokenizer


class FlatModel:
    """Its next token depends on the last one alone, and it leaves the cache as it is.

    Args:
        vocab_size: number of tokens.
        max_position: longest sequence in tokens.
    """

    draft_tokens = None
    dtype = torch.float32
    exact = False

    def __init__(self, vocab_size: int = 64, max_position: int = 2**17) -> None:
        self.config = SimpleNamespace(
            has_features=False,
            is_draft_head=False,
            block=None,
            num_layers=1,
            num_storing_layers=1,
            num_kv_heads=1,
            head_dim=1,
            vocab_size=vocab_size,
            max_position=max_position,
            window=lambda layer: 0,
            kv_shape=lambda layer: KVShape(1, 1),
            kv_layer=lambda layer: layer,
            states=None,
            state_layers=(),
            has_state=lambda layer: False,
            latent_attention=None,
            indexer=None,
        )
        self._logits = torch.randn(vocab_size, vocab_size, generator=torch.Generator().manual_seed(1))

    def forward(self, batch: Batch, kv_cache: KVCache) -> Tensor:
        return batch.token_ids[:, None]

    def logits(self, hidden: Tensor, indices: Tensor, adapter_ids: Tensor | None = None) -> Tensor:
        return self._logits[hidden[indices, 0] % len(self._logits)]


def flat_engine(draft: bool = False, model: FlatModel | None = None, **limits: int) -> Engine:
    config = EngineConfig(kv_cache_dtype=torch.float32, enforce_eager=True, **limits)  # type: ignore[arg-type]
    draft_model = FlatModel() if draft else None
    return Engine(model or FlatModel(), ToyTokenizer(), config, draft_model)  # type: ignore[arg-type]
