"""A model and a tokenizer for tests of the engine, small enough to say what every request must give.

The model's next token is a hash of all tokens before it, as it reads them back from the paged cache: one wrong slot,
block or position and the text is another one.
"""

import re
from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fastinfer.engine.config import EngineConfig
from fastinfer.engine.engine import Engine
from fastinfer.engine.sequence import SequenceState
from fastinfer.engine.worker import Worker
from fastinfer.models.batch import Batch
from fastinfer.models.config import KVShape
from fastinfer.models.kv_cache import KVCache, LayerCache
from fastinfer.models.state_config import LinearAttentionConfig
from fastinfer.ops.prompt import NO_ROW

VOCAB_SIZE = 64
EOS_ID = 0
MAX_POSITION = 96
NUM_LAYERS = 2


def extended(value: int, token: int) -> int:
    """The hash of a text and one more token."""
    return (value * 1_000_003 + token + 1) % 2**61


def hashes_of(tokens: list[int]) -> list[int]:
    """Of each token a hash of the text up to it."""
    hashes, value = [], 17
    for token in tokens:
        value = extended(value, token)
        hashes.append(value)
    return hashes


def random_logits(seed: int) -> Tensor:
    return torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))


def logits_of(tokens: list[int]) -> Tensor:
    """Logits [vocab] fp32 after these tokens: different for every sequence, without ties."""
    return random_logits(hashes_of(tokens)[-1])


def greedy(prompt: list[int], max_tokens: int, *, stop_at_eos: bool = True) -> list[int]:
    """What greedy decoding of one request gives, without any engine."""
    tokens = list(prompt)
    while len(tokens) < min(len(prompt) + max_tokens, MAX_POSITION):
        tokens.append(int(logits_of(tokens).argmax()))
        if stop_at_eos and tokens[-1] == EOS_ID:
            break
    return tokens[len(prompt) :]


@dataclass(frozen=True)
class ToyConfig:
    windows: tuple[int, ...]
    num_layers: int = NUM_LAYERS
    num_reading_layers: int = 0
    num_kv_heads: int = 1
    head_dim: int = 1
    vocab_size: int = VOCAB_SIZE
    max_position: int = MAX_POSITION
    num_experts: int = 0
    states: LinearAttentionConfig | None = None
    state_layers: tuple[bool, ...] = ()
    latent_attention: None = None
    indexer: None = None
    has_features: bool = False
    is_draft_head: bool = False
    block: None = None

    @property
    def num_storing_layers(self) -> int:
        return self.num_layers - self.num_reading_layers

    def window(self, layer: int) -> int:
        return self.windows[layer]

    def has_state(self, layer: int) -> bool:
        return bool(self.state_layers) and self.state_layers[layer]

    def kv_shape(self, layer: int) -> KVShape:
        return KVShape(self.num_kv_heads, self.head_dim)

    def kv_layer(self, layer: int) -> int:
        return layer


class ToyModel:
    """Stores token and position of every token in every layer, and reads back all that the layer's window shows.

    If all layers have a window, a token's hash is that of the text in the largest window.
    """

    draft_tokens: Tensor | None = None
    dtype = torch.float32
    exact = False

    def __init__(self, windows: tuple[int, ...] = (0,) * NUM_LAYERS) -> None:
        self.windows = windows
        self.config = ToyConfig(windows)
        self.fail = False
        self.batch_sizes: list[int] = []

    def forward(self, batch: Batch, kv_cache: KVCache) -> Tensor:
        """Of each token the hash of the text up to it, [tokens, 1] int64."""
        if self.fail:
            raise RuntimeError("the model broke")
        self.batch_sizes.append(len(batch.token_ids))
        for cache in _with_blocks(kv_cache):
            cache.k.view(-1)[batch.slot_mappings[cache.group]] = self._stored(batch).float()
            cache.v.view(-1)[batch.slot_mappings[cache.group]] = batch.positions.float()
        hashes: list[int] = []
        for row, (start, end) in enumerate(pairwise(batch.query_start.tolist())):
            tokens, length = self._read(batch, kv_cache, row), end - start
            if 0 in self.windows:
                hashes += hashes_of(tokens)[-length:]
            else:
                ends = range(len(tokens) - length + 1, len(tokens) + 1)
                hashes += [hashes_of(tokens[max(end - max(self.windows), 0) : end])[-1] for end in ends]
        return torch.tensor(hashes)[:, None]

    def logits(self, hidden: Tensor, indices: Tensor, adapter_ids: Tensor | None = None) -> Tensor:
        rows = [random_logits(seed) for seed in hidden[indices, 0].tolist()]
        return torch.stack(rows) if rows else torch.empty(0, VOCAB_SIZE)

    def normalize(self, hidden: Tensor) -> Tensor:
        """[tokens, 8]: something that every token has its own of."""
        return torch.stack([random_logits(seed)[:8] for seed in hidden[:, 0].tolist()])

    def _stored(self, batch: Batch) -> Tensor:
        """Return the numbers that the cache keeps for the tokens, [tokens] int64."""
        return batch.token_ids

    def _read(self, batch: Batch, kv_cache: KVCache, row: int) -> list[int]:
        """The tokens that this step's tokens see, and themselves; fails if the layers do not agree."""
        length = int(batch.seq_lens[row])
        start, end = batch.query_start[row : row + 2].tolist()
        first = length - (end - start)
        assert batch.positions[start:end].tolist() == list(range(first, length))
        found: list[list[int]] = []
        for cache, window in zip(_with_blocks(kv_cache), self.windows, strict=True):
            seen = max(first - window + 1, 0) if window else 0
            block_size = cache.k.shape[1]
            blocks = batch.block_tables[cache.group][row, : -(-length // block_size)].long()
            assert torch.equal(cache.v[blocks].flatten()[seen:length], torch.arange(seen, length).float())
            found.append(cache.k[blocks].flatten()[seen:length].int().tolist())
        longest = max(found, key=len)
        assert all(longest[-len(tokens) :] == tokens for tokens in found)
        return longest


def _with_blocks(kv_cache: KVCache) -> list[LayerCache]:
    return [cache for cache in kv_cache if isinstance(cache, LayerCache)]


def first_prompt_row() -> int:
    """The setting of ``ops.prompt_rows``."""
    value: int = torch.ops.fastinfer.set_first_prompt_row(0)
    torch.ops.fastinfer.set_first_prompt_row(value)
    return value


def as_prompt(token_ids: list[int]) -> list[int]:
    """Return the numbers that :class:`RoleToy` keeps for tokens that it computes as those of a prompt."""
    return [token_id + VOCAB_SIZE for token_id in token_ids]


class RoleToy(ToyModel):
    """Computes prompts differently than generated tokens: the text is another one if any token has the wrong role."""

    def logits(self, hidden: Tensor, indices: Tensor, adapter_ids: Tensor | None = None) -> Tensor:
        assert first_prompt_row() == NO_ROW, "each row of logits decides a generated token"
        return super().logits(hidden, indices, adapter_ids)

    def _stored(self, batch: Batch) -> Tensor:
        return batch.token_ids + VOCAB_SIZE * (torch.arange(len(batch.token_ids)) >= first_prompt_row())


class LastRowsToy(ToyModel):
    """Returns the hidden states of wanted rows alone, like a model whose last layers store nothing."""

    def __init__(self, windows: tuple[int, ...] = (0,) * NUM_LAYERS) -> None:
        super().__init__(windows)
        self.config = replace(self.config, num_reading_layers=1)

    def forward(self, batch: Batch, kv_cache: KVCache) -> Tensor:
        hidden, last = super().forward(batch, kv_cache), batch.last
        if last is None:
            return hidden
        counts = last.query_start.diff().tolist()
        ends = batch.query_start[1:].tolist()
        expected = [row for end, count in zip(ends, counts, strict=True) for row in range(end - count, end)]
        rows = last.rows[: len(expected)]  # the others are padding
        assert rows.tolist() == expected
        assert torch.equal(last.positions[: len(rows)], batch.positions[rows])
        is_prompt = torch.arange(len(rows)) >= last.first_prompt_row
        assert torch.equal(is_prompt, rows >= first_prompt_row())
        return hidden[last.rows]


class LastRowsRoleToy(LastRowsToy, RoleToy):
    """Both."""


class Forgetful(ToyModel):
    """A draft model that agrees with the toy more often than not."""

    def logits(self, hidden: Tensor, indices: Tensor, adapter_ids: Tensor | None = None) -> Tensor:
        rows = [random_logits(seed) + random_logits(seed + 1) / 2 for seed in hidden[indices, 0].tolist()]
        return torch.stack(rows) if rows else torch.empty(0, VOCAB_SIZE)


class ForgetfulRoleToy(Forgetful, RoleToy):
    """A draft model that agrees with :class:`RoleToy` more often than not."""


class ToyTokenizer:
    """Token i is a byte or two: letters, half an umlaut (so that characters span tokens), and pairs of letters."""

    eos_ids = frozenset({EOS_ID})
    vocab_size = VOCAB_SIZE
    max_token_length = 2
    bos_token, eos_token = "", "</s>"
    chat_template = "{% for message in messages %}{{ message.content }}{{ extra }},{% endfor %}"
    pieces = (
        b"</s>",
        *(bytes([c]) for c in b"abcdefghijklmnopqrstuvwxyz .,"),
        b"\xc3",
        b"\xa4",
        *(bytes([c, c + 1]) for c in b"abcdefghijklmnopqrstuvwxy"),
        *(bytes([c, c]) for c in b"abcdefg"),
    )

    bos_id = response_template = None
    control_ids = frozenset({EOS_ID})
    control_tokens = {"</s>": EOS_ID}  # noqa: RUF012
    control_pattern = re.compile("</s>")

    def encode(
        self, text: str, add_special_tokens: bool = True, parse_special: bool = True, continues: bool = False
    ) -> list[int]:
        texts = text.split("</s>") if parse_special else [text]
        known = {piece: token_id for token_id, piece in enumerate(self.pieces)}
        letters = [[bytes([byte]) for byte in part.encode()] for part in texts]
        ids = [[known[letter] for letter in part if letter in known] for part in letters]
        return [token_id for part in ids for token_id in [EOS_ID, *part]][1:]

    def token_bytes(self, token_id: int, skip_special_tokens: bool = True) -> bytes:
        return b"" if skip_special_tokens and token_id == EOS_ID else self.pieces[token_id]

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return b"".join(self.token_bytes(i, skip_special_tokens) for i in ids).decode(errors="replace")


def toy_engine(draft_model: ToyModel | None = None, model: ToyModel | None = None, **limits: Any) -> Engine:
    # The toy computes with torch, which no graph records.
    config = EngineConfig(kv_cache_dtype=torch.float32, enforce_eager=True, **limits)
    engine = Engine(model or ToyModel(), ToyTokenizer(), config, draft_model, fingerprint="toy")  # type: ignore[arg-type]
    for worker in engine._workers:
        for tensor in (tensor for cache in worker.kv_cache for tensor in cache.tensors):
            tensor.fill_(float("nan"))
    return engine


def prompts(count: int) -> list[list[int]]:
    return [[(7 * i + 3 * j) % VOCAB_SIZE for j in range(1 + 5 * i % 23)] for i in range(count)]


def always_speculate(engine: Engine) -> Engine:
    """As if drafts cost nothing: how far ahead is guessed does not depend on the time that steps take."""
    assert engine.speculator is not None
    engine.speculator._choose = lambda sequences, available: available  # type: ignore[method-assign]
    return engine


def drain(engine: Engine, limit: int = 10_000) -> dict[str, Any]:
    """Step until all is done; the last output of each request."""
    last = {}
    for _ in range(limit):
        if not engine.has_unfinished:
            return last
        last.update({output.request_id: output for output in engine.step()})
    raise AssertionError(f"not done after {limit} steps")


def check_blocks(engine: Engine) -> None:
    """Every block is free, cached or held, by exactly as many sequences as are counted."""
    manager, scheduler = engine.block_manager, engine.scheduler
    pinned = [prompt for prompt in engine.pinned_prompts.sequences if prompt.state is SequenceState.FINISHED]
    pinned = [prompt for prompt in pinned if prompt.block_tables]  # a sleeping engine's prompts have none
    num_used = 0
    for group, pool in enumerate(manager.pools):
        holders = [sequence.block_tables[group].held for sequence in [*scheduler.running, *pinned]]
        held = Counter(block for blocks in holders for block in set(blocks))
        assert pool._ref_counts == [held[block] for block in range(pool.num_blocks)]
        assert pool.num_free + pool.num_cached + len(held) == pool.num_blocks
        assert not set(pool._free) & set(pool._cached)
        assert {block for block, content in enumerate(pool._contents) if content} == set(pool._by_key.values())
        num_used += len(held)
    if manager.states is not None:
        holders = [sequence.states for sequence in [*scheduler.running, *pinned] if sequence.states]
        slots = Counter(slot for states in holders for slot in states.held)
        pool = manager.states.pool
        assert pool._ref_counts == [slots[slot] for slot in range(pool.num_blocks)]
        assert pool.num_free + pool.num_cached + len(slots) == pool.num_blocks
        assert not set(pool._free) & set(pool._cached)
        assert {slot for slot, content in enumerate(pool._contents) if content} == set(pool._by_key.values())
        assert not any(sequence.states for sequence in scheduler.waiting)
    assert manager.num_used == num_used
    assert not any(sequence.block_tables for sequence in scheduler.waiting)
    assert scheduler.num_waiting_tokens == sum(sequence.num_queued_tokens for sequence in scheduler.waiting)
    assert all(0 <= len(sequence) - sequence.num_queued_tokens <= 1 for sequence in scheduler.waiting)
    assert sum(sequence.num_slots for sequence in scheduler.running) <= scheduler.max_num_seqs
    if engine.offloading is not None:
        with mock.patch.object(Worker, "read_part", side_effect=AssertionError("the step left something to store")):
            engine.offloading.save()
        if (host := engine.offloading.host) is not None:
            assert host.num_bytes == sum(copy.num_bytes for copy in host._blocks.values()) <= host.max_bytes
