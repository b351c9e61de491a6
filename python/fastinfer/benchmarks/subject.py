"""Model under test."""

import random
from dataclasses import dataclass
from typing import Any

import torch

from fastinfer import hub
from fastinfer.engine.config import EngineConfig
from fastinfer.engine.engine import Engine
from fastinfer.errors import RequestError
from fastinfer.llm import kv_cache_dtype_of
from fastinfer.models import Model, load_model
from fastinfer.models.kv_cache import num_blocks_for
from fastinfer.tokenizers.chat_template import render
from fastinfer.tokenizers.tokenizer import Tokenizer
from fastinfer.utils.device import resolve_device


@dataclass(frozen=True)
class Subject:
    """Loaded model whose weights are shared by engines with different options.

    Attributes:
        model, tokenizer: the model.
        kv_cache_dtype: dtype of the cached keys and values.
        device: device of the model.
        context: ``max_model_len`` of all engines; ``None`` for what each of them needs.
        draft_model: draft model or draft head of all engines; ``None`` for none.
    """

    model: Model
    tokenizer: Tokenizer
    kv_cache_dtype: torch.dtype
    device: str = "cpu"
    context: int | None = None
    draft_model: Model | None = None

    @classmethod
    def load(
        cls,
        name: str,
        dtype: str = "auto",
        *,
        device: str = "auto",
        kv_cache_dtype: str = "auto",
        max_model_len: int | None = None,
    ) -> "Subject":
        """Load a model by a name or path that :func:`fastinfer.hub.resolve` knows.

        The other arguments are those of :class:`fastinfer.LLM`.
        """
        device = resolve_device(device)
        cache_dtype = kv_cache_dtype_of(kv_cache_dtype, dtype, device)
        model, tokenizer = load_model(hub.resolve(name), dtype, device, max_model_len)
        return cls(model, tokenizer, cache_dtype, device, max_model_len)

    def check_context(self, longest: int, whose: str) -> None:
        """Check that a sequence of ``longest`` tokens fits into the context of the engines.

        Raises:
            RequestError: the context is shorter; the message says ``whose`` sequence it is.
        """
        limit = self.context or self.model.config.max_position
        if longest > limit:
            raise RequestError(f"--context must be at least {longest} for {whose}, got {limit}")

    def make_engine(self, *, max_num_seqs: int, max_model_len: int, **options: Any) -> Engine:
        """Create an engine whose cache holds ``max_num_seqs`` of the longest sequences, so that none waits for memory.

        ``options`` are further fields of :class:`fastinfer.engine.config.EngineConfig`.

        Raises:
            RequestError: the context is shorter than the longest sequence.
        """
        self.check_context(max_model_len, "these requests")
        max_model_len = self.context or max_model_len
        # One more block each, because the scheduler reserves a spare one for every running sequence.
        num_blocks = max_num_seqs * (num_blocks_for(max_model_len, EngineConfig.block_size) + 1)
        config = EngineConfig(
            device=self.device,
            kv_cache_dtype=self.kv_cache_dtype,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            num_kv_blocks=num_blocks,
            **options,
        )
        return Engine(self.model, self.tokenizer, config, self.draft_model)

    def random_prompt(self, rng: random.Random, length: int) -> list[int]:
        """Return meaningless token ids, which no cache has and no speculation predicts."""
        vocab_size = self.model.config.vocab_size
        return [rng.randrange(min(100, vocab_size // 2), min(1000, vocab_size)) for _ in range(length)]

    def chat_prompt(self, message: str, system: str | None = None) -> list[int]:
        """Return the token ids of a user's message in the model's chat template, or as plain text without one."""
        tokenizer = self.tokenizer
        if tokenizer.chat_template is None:
            return tokenizer.encode(message if system is None else f"{system}\n\n{message}")
        messages = [] if system is None else [{"role": "system", "content": system}]
        messages.append({"role": "user", "content": message})
        text = render(tokenizer.chat_template, messages, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)
        return tokenizer.encode(text, add_special_tokens=False)
