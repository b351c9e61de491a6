"""A model that answers as a script says, over a vocabulary of bytes and control tokens."""

import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fastinfer.engine.config import EngineConfig
from fastinfer.engine.engine import Engine
from fastinfer.models.batch import Batch
from fastinfer.models.kv_cache import KVCache
from support.toy import ToyConfig, ToyModel

MAX_POSITION = 4096
END = "<|end|>"
# Ends the prompt: what follows is the answer.
ANSWER = "<|answer|>"


class ScriptedTokenizer:
    """Token i < 256 is a byte; control tokens follow, and other texts that are one token.

    Args:
        chat_template: the template.
        control: spellings of control tokens beside ``END`` and ``ANSWER``.
        literal: texts that are one token each.
    """

    bos_token, eos_token = "", END
    bos_id = None

    def __init__(
        self,
        chat_template: str,
        control: Sequence[str] = (),
        literal: Sequence[str] = (),
        response_template: Any = None,
    ) -> None:
        self.chat_template = chat_template
        self.response_template = response_template
        special = [END, ANSWER, *control]
        self.pieces = [*(bytes([i]) for i in range(256)), *(text.encode() for text in (*special, *literal))]
        self.vocab_size = len(self.pieces)
        self.max_token_length = max(map(len, self.pieces))
        self.control_tokens = {text: 256 + i for i, text in enumerate(special)}
        self.control_ids = frozenset(self.control_tokens.values())
        self.eos_ids = frozenset({256})
        self.control_pattern = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))))
        self._literal = {text: 256 + len(special) + i for i, text in enumerate(literal)}

    def encode(
        self, text: str, add_special_tokens: bool = True, parse_special: bool = True, continues: bool = False
    ) -> list[int]:
        known = self._literal | (self.control_tokens if parse_special else {})
        if not known:
            return list(text.encode())
        pattern = "|".join(map(re.escape, sorted(known, key=len, reverse=True)))
        ids: list[int] = []
        for part in re.split(f"({pattern})", text):
            ids += [known[part]] if part in known else list(part.encode())
        return ids

    def token_bytes(self, token_id: int, skip_special_tokens: bool = True) -> bytes:
        return b"" if skip_special_tokens and token_id in self.control_ids else self.pieces[token_id]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return b"".join(self.token_bytes(i, skip_special_tokens) for i in ids).decode(errors="replace")


class ScriptedModel(ToyModel):
    """Answers each prompt with a text, in which control tokens are spelled out.

    Args:
        tokenizer: its tokenizer.
        answer: function from the prompt, up to ``ANSWER``, to the text.
        header: what the template writes behind ``ANSWER``, such as the beginning of the assistant's turn.

    Attributes:
        prompts: the prompts so far, without repetitions.
    """

    def __init__(self, tokenizer: ScriptedTokenizer, answer: Callable[[str], str], header: str = "") -> None:
        super().__init__(windows=(0,))
        self.config = ToyConfig(self.windows, 1, vocab_size=tokenizer.vocab_size, max_position=MAX_POSITION)
        self.prompts: list[str] = []
        self.tokenizer = tokenizer
        self._answer = answer
        self._num_header_tokens = len(tokenizer.encode(header))

    def forward(self, batch: Batch, kv_cache: KVCache) -> Tensor:
        """[tokens, 1]: the token that follows each one."""
        for cache in kv_cache:
            cache.k.view(-1)[batch.slot_mappings[cache.group]] = batch.token_ids.float()
            cache.v.view(-1)[batch.slot_mappings[cache.group]] = batch.positions.float()
        following: list[int] = []
        for row, (start, end) in enumerate(pairwise(batch.query_start.tolist())):
            tokens = self._read(batch, kv_cache, row)
            following += [0] * (end - start - 1) + [self._next(tokens)]
        return torch.tensor(following)[:, None]

    def logits(self, hidden: Tensor, indices: Tensor, adapter_ids: Tensor | None = None) -> Tensor:
        logits = torch.zeros(len(indices), self.tokenizer.vocab_size)
        # Where a grammar forbids the token, one of these comes next.
        logits[:, list(b'}"]')] = 1.0
        logits[torch.arange(len(indices)), hidden[indices, 0]] = 50.0
        return logits

    def _next(self, tokens: list[int]) -> int:
        mark = self.tokenizer.control_tokens[ANSWER]
        if mark not in tokens:
            return 0
        end = len(tokens) - 1 - tokens[::-1].index(mark)
        place = end + 1 + self._num_header_tokens
        if len(tokens) < place:
            return 0
        prompt = self.tokenizer.decode(tokens[:end], skip_special_tokens=False)
        if prompt not in self.prompts:
            self.prompts.append(prompt)
        script = [*self.tokenizer.encode(self._answer(prompt)), *self.tokenizer.eos_ids]
        return script[min(len(tokens) - place, len(script) - 1)]


def scripted_model(tokenizer: ScriptedTokenizer, answer: Callable[[str], str] | str, header: str = "") -> ScriptedModel:
    """A model whose answers are a text, or a function of the prompt."""
    return ScriptedModel(tokenizer, answer if callable(answer) else lambda _: answer, header)


def scripted_engine(model: ScriptedModel, **limits: Any) -> Engine:
    config = EngineConfig(kv_cache_dtype=torch.float32, enforce_eager=True, **limits)
    tokenizer: Any = model.tokenizer
    return Engine(model, tokenizer, config, fingerprint="scripted")
