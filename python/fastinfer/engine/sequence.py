"""One running text as the scheduler, the cache and the sampler see it: token ids and how far they are computed."""

import hashlib
import itertools
import time
from enum import Enum, auto
from typing import TypedDict

from fastinfer.engine.acceptance import Acceptance
from fastinfer.engine.grammar import Grammar
from fastinfer.engine.ngram_index import NgramIndex
from fastinfer.engine.token_counts import TokenCounts
from fastinfer.sampling_params import SamplingParams

_arrivals = itertools.count()


class SequenceOwner(TypedDict):
    """Arguments of :class:`Sequence` that all sequences of a request share."""

    priority: int
    cache_salt: str
    adapter: int
    adapter_key: str


class SequenceState(Enum):
    PENDING = auto()  # not with the scheduler: its grammar is being compiled, or another sequence has to come first
    WAITING = auto()  # holds no KV blocks: new, or preempted
    RUNNING = auto()
    FINISHED = auto()


class Sequence:
    """Prompt and generated tokens of one completion, with its place in the KV cache.

    Attributes:
        request_id: of the request it belongs to.
        token_ids: prompt, then generated tokens.
        num_prompt_tokens: how many of them are the prompt.
        num_computed_tokens: how many have their keys and values in the cache.
        num_prefill_tokens: how many there were when it was admitted: until so many are computed, it does not decode.
        max_length: it ends with so many tokens, prompt included.
        blocks: cache blocks in the order of the tokens, owned by ``BlockManager``: the list grows at its end, and is
            replaced by a new one when anything else changes.
        block_keys: of the prefix cache, one for each full block that was looked up; owned by ``BlockManager``.
        num_cached_blocks: how many of its blocks the prefix cache knows.
        cache_root: what the keys begin with: tokens are shared only under the same salt and adapter.
        reads_prefix: whether it may take computed blocks from the prefix cache.
        samples: whether a token is drawn when all of it is computed.
        params, seed: how its tokens are drawn; with a token's position the seed decides that token's draw.
        adapter: slot of its LoRA adapter, -1 for none.
        siblings: sequences that begin as copies of this one once its prompt is computed.
        may_speculate: whether its next tokens may be guessed.
        num_drafts: so many tokens after its last one may be guessed and verified in the next step.
        acceptance, ngrams: what the speculation knows of it.
        draft_gap: how many computed tokens, the newest ones, a draft model has not computed yet.
        counts: of its tokens, where the penalties want them.
        grammar: what its text must obey.
        arrival_time: in seconds of ``time.perf_counter``.
        order: sequences are served in this order: priority, then arrival.
    """

    __slots__ = (
        "acceptance",
        "adapter",
        "arrival_time",
        "block_keys",
        "blocks",
        "cache_root",
        "counts",
        "draft_gap",
        "grammar",
        "max_length",
        "may_speculate",
        "ngrams",
        "num_cached_blocks",
        "num_computed_tokens",
        "num_drafts",
        "num_prefill_tokens",
        "num_prompt_tokens",
        "order",
        "params",
        "reads_prefix",
        "request_id",
        "samples",
        "seed",
        "siblings",
        "state",
        "token_ids",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        seed: int,
        *,
        max_length: int = 2**31 - 1,
        priority: int = 0,
        cache_salt: str = "",
        adapter: int = -1,
        adapter_key: str = "",
        reads_prefix: bool = True,
        samples: bool = True,
    ) -> None:
        self.request_id = request_id
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = self.num_prefill_tokens = len(prompt_token_ids)
        self.num_computed_tokens = 0
        self.max_length = max_length
        self.blocks: list[int] = []
        self.block_keys: list[bytes] = []
        self.num_cached_blocks = 0
        self.cache_root = hashlib.sha256(repr((cache_salt, adapter_key)).encode()).digest()
        self.reads_prefix = reads_prefix
        self.samples = samples
        self.params = params
        self.seed = seed
        self.adapter = adapter
        self.siblings: list[Sequence] = []
        self.num_drafts = 0
        self.acceptance: Acceptance | None = None
        self.ngrams: NgramIndex | None = None
        self.draft_gap = 0
        self.may_speculate = True
        self.counts: TokenCounts | None = None
        self.grammar: Grammar | None = None
        self.state = SequenceState.PENDING
        self.arrival_time = time.perf_counter()
        self.order = (priority, next(_arrivals))

    def __len__(self) -> int:
        return len(self.token_ids)

    def copy(self) -> "Sequence":
        """A new sequence with the same tokens and the same place in the order, for the scheduler to fork."""
        other = Sequence(self.request_id, self.token_ids, self.params, self.seed, max_length=self.max_length)
        other.num_prompt_tokens = self.num_prompt_tokens
        other.cache_root, other.adapter = self.cache_root, self.adapter
        other.order, other.may_speculate = self.order, self.may_speculate
        return other

    def append(self, token_id: int) -> None:
        """Take in a generated token."""
        self.token_ids.append(token_id)
        if self.counts is not None:
            self.counts.add(token_id)

    @property
    def num_uncomputed_tokens(self) -> int:
        """1 for a sequence that decodes; more while its prompt (or, after a preemption, all of it) is processed."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        return self.num_computed_tokens >= self.num_prefill_tokens

    @property
    def num_slots(self) -> int:
        """Sequences that run or will run because this one does."""
        return 1 + len(self.siblings)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]
