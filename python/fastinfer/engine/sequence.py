"""A sequence: the token ids of one text and how many of them are computed."""

import itertools
import time
from bisect import bisect_right
from enum import Enum, auto
from typing import TypedDict

from fastinfer.engine.acceptance import Acceptance
from fastinfer.engine.block_table import BlockTable
from fastinfer.engine.grammar import Grammar
from fastinfer.engine.ngram_index import NgramIndex
from fastinfer.engine.prefix_hash import PrefixScan, first_key
from fastinfer.engine.prompt_images import PromptImages
from fastinfer.engine.prompt_layout import PromptLayout
from fastinfer.engine.state_table import StateTable
from fastinfer.engine.token_counts import TokenCounts
from fastinfer.engine.token_rules import TokenRules
from fastinfer.sampling_params import SamplingParams

_arrivals = itertools.count()


class SequenceOptions(TypedDict):
    """Arguments of :class:`Sequence` that are the same for all sequences of a request."""

    priority: int
    cache_salt: str
    adapter_key: str
    images: PromptImages | None
    layout: PromptLayout | None


class SequenceState(Enum):
    """Stage of a sequence between its arrival and its end."""

    PENDING = (
        auto()
    )  # unknown to the scheduler: it waits for its grammar or adapter, or another sequence must run first
    WAITING = auto()  # in the scheduler's queue, without KV blocks: new or preempted
    RUNNING = auto()  # in the scheduler's running list, with KV blocks
    FINISHED = auto()


class Sequence:
    """Prompt and generated tokens of one completion, and the cache blocks that hold them.

    Attributes:
        request_id: id of the request that the sequence belongs to.
        token_ids: prompt, then generated tokens.
        num_prompt_tokens: length of the prompt in tokens.
        num_computed_tokens: number of tokens whose keys and values are in the cache.
        num_prefill_tokens: length in tokens when the sequence was last admitted; it decodes once these are computed.
        max_length: number of tokens, prompt included, at which the sequence ends.
        block_tables: cache blocks in each group of layers, managed by ``BlockManager``; empty if there are none.
        states: slots with the sequence's states, managed by ``StateManager``; ``None`` if there are none.
        block_keys: keys of the full blocks in the prefix cache, as far as they were needed; managed by
            ``BlockManager``.
        prefix_scan: what the block manager last found of the prefix while the sequence waited; ``None`` before.
        num_cached_blocks: number of leading blocks that have been offered to the prefix cache.
        num_writable_tokens: length in tokens up to which the sequence may grow without asking for blocks: those that it
            has hold as many tokens, and nobody shares the one that is written next. Managed by ``BlockManager``.
        is_loading: whether the next blocks may be in a store beyond the cache; nothing is computed until they are
            loaded.
        cache_salt: name of the group of requests that may share prefixes.
        first_key: key before the first block's, see :func:`fastinfer.engine.prefix_hash.first_key`.
        reads_prefix: whether the sequence may reuse computed blocks from the prefix cache.
        samples: whether a token is drawn once all tokens are computed.
        params: sampling parameters.
        next_prompt_logprob: position of the next prompt token whose log-probabilities are wanted; ``None`` for none.
        pooling: ``"mean"`` or ``"last"`` if hidden states are wanted; ``None`` if not.
        seed: random seed; together with a token's position it determines that token's draw.
        adapter: slot of the LoRA adapter; -1 for none, and while the sequence waits for it.
        adapter_key: identity of the LoRA adapter; empty for none.
        images: images of the prompt; ``None`` for none.
        layout: positions of the tokens, and what they see, if the prompt has modules; ``None`` if each token's position
            is its index, and it sees all tokens before it.
        siblings: sequences that are forked from this one once its prompt is computed.
        may_speculate: whether the speculator may draft tokens for this sequence.
        num_drafts: maximum number of tokens to draft for the next step.
        acceptance: the speculator's estimate of how many drafts are right.
        ngrams: the speculator's index of the text.
        draft_gap: number of computed tokens, the newest ones, that the draft model has not computed yet.
        counts: token counts for the penalties; ``None`` if there are no penalties.
        token_rules: the tokens that the parameters allow; ``None`` for all.
        grammar: grammar that the generated text must match; ``None`` for any text.
        grammar_is_valid: whether the grammar is in the state after the generated tokens, see :meth:`restore_grammar`.
        forced: tokens that must be drawn next, because the grammar leaves no choice and each token's log-probabilities
            are wanted; otherwise such tokens are appended without a draw.
        state: see :class:`SequenceState`.
        arrival_time: time of creation in seconds of ``time.perf_counter``.
        first_scheduled_time: time of the first step that computed tokens of the sequence; ``None`` before.
        order: sort key by which sequences are served: priority, then number of arrival.
        last_step: number of the last step that computed tokens, as the scheduler counts; -1 before.
        num_queued_tokens: length when the sequence was last queued; a beam may get one more token while it waits.
        num_overtakers: number of later sequences that were admitted while this one had no room.
        runs_ahead: whether the request can be updated after the next step was launched, see :attr:`may_run_ahead`.
        num_unknown_tokens: tokens after ``token_ids`` that launched steps draw and the host does not know yet.
        drawn_row: row of the last launched draw in which the last of them is drawn.
        num_restarts: how often the results of launched steps were given up, see :meth:`forget_launched`.
    """

    __slots__ = (
        "acceptance",
        "adapter",
        "adapter_key",
        "arrival_time",
        "block_keys",
        "block_tables",
        "cache_salt",
        "counts",
        "draft_gap",
        "drawn_row",
        "first_key",
        "first_scheduled_time",
        "forced",
        "grammar",
        "grammar_is_valid",
        "images",
        "is_loading",
        "last_step",
        "layout",
        "max_length",
        "may_speculate",
        "next_prompt_logprob",
        "ngrams",
        "num_cached_blocks",
        "num_computed_tokens",
        "num_drafts",
        "num_overtakers",
        "num_prefill_tokens",
        "num_prompt_tokens",
        "num_queued_tokens",
        "num_restarts",
        "num_unknown_tokens",
        "num_writable_tokens",
        "order",
        "params",
        "pooling",
        "prefix_scan",
        "reads_prefix",
        "request_id",
        "runs_ahead",
        "samples",
        "seed",
        "siblings",
        "state",
        "states",
        "token_ids",
        "token_rules",
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
        adapter_key: str = "",
        images: PromptImages | None = None,
        layout: PromptLayout | None = None,
        reads_prefix: bool = True,
        samples: bool = True,
    ) -> None:
        self.request_id = request_id
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = self.num_prefill_tokens = len(prompt_token_ids)
        self.num_computed_tokens = 0
        self.max_length = max_length
        self.block_tables: list[BlockTable] = []
        self.states: StateTable | None = None
        self.block_keys: list[bytes] = []
        self.prefix_scan: PrefixScan | None = None
        self.num_cached_blocks = 0
        self.num_writable_tokens = 0
        self.is_loading = False
        self.cache_salt = cache_salt
        self.first_key = first_key(cache_salt, "")
        self.reads_prefix = reads_prefix
        self.samples = samples
        self.params = params
        self.next_prompt_logprob: int | None = None
        self.pooling: str | None = None
        self.seed = seed
        self.adapter = -1
        self.adapter_key = adapter_key
        self.images = images
        self.layout = layout
        self.siblings: list[Sequence] = []
        self.num_drafts = 0
        self.acceptance: Acceptance | None = None
        self.ngrams: NgramIndex | None = None
        self.draft_gap = 0
        self.may_speculate = True
        self.counts: TokenCounts | None = None
        self.token_rules: TokenRules | None = None
        self.grammar: Grammar | None = None
        self.grammar_is_valid = True
        self.forced: list[int] = []
        self.state = SequenceState.PENDING
        self.arrival_time = time.perf_counter()
        self.first_scheduled_time: float | None = None
        self.order = (priority, next(_arrivals))
        self.last_step = -1
        self.num_queued_tokens = 0
        self.num_overtakers = 0
        self.runs_ahead = False
        self.num_unknown_tokens = 0
        self.drawn_row = 0
        self.num_restarts = 0

    def __len__(self) -> int:
        return len(self.token_ids)

    def copy(self) -> "Sequence":
        """Return a new sequence with the same tokens and the same place in the order, ready to be forked."""
        other = Sequence(self.request_id, self.token_ids, self.params, self.seed, max_length=self.max_length)
        other.num_prompt_tokens = self.num_prompt_tokens
        other.cache_salt, other.first_key = self.cache_salt, self.first_key
        other.adapter, other.adapter_key = self.adapter, self.adapter_key
        other.order, other.may_speculate = self.order, self.may_speculate
        other.images, other.layout = self.images, self.layout
        return other

    def use_adapter(self, slot: int, digest: str) -> None:
        """Set the LoRA adapter, before anything is computed.

        Args:
            slot: slot of the adapter.
            digest: identity of the adapter's updates, under which computed blocks are found.
        """
        self.adapter = slot
        self.first_key = first_key(self.cache_salt, digest)

    def restart(self) -> None:
        """Forget what was computed, the tokens that launched steps draw included."""
        self.forget_launched()
        self.forget_cache()
        self.num_cached_blocks = self.num_computed_tokens = self.num_writable_tokens = 0
        self.grammar_is_valid = False

    def forget_launched(self) -> None:
        """Forget the tokens that launched steps draw, whose results are of no use any more."""
        self.num_restarts += 1
        self.num_unknown_tokens = 0

    def forget_cache(self) -> None:
        """Forget which blocks and slots the sequence holds, when the books of their managers are rebuilt."""
        self.block_tables = []
        self.states = None

    def restore_grammar(self) -> None:
        """Return the grammar to the state after the generated tokens, if an interrupted draw may have changed it."""
        if not self.grammar_is_valid:
            if self.grammar is not None:
                self.grammar.replay(self.output_token_ids)
            self.grammar_is_valid = True

    def append(self, token_id: int) -> None:
        """Append a generated token."""
        self.token_ids.append(token_id)
        if self.counts is not None:
            self.counts.add(token_id)

    def chunk_end(self, end: int, multiple: int = 1) -> int:
        """Return the last token up to ``end`` at which a chunk of the next tokens may end.

        Args:
            end: index of the token behind the chunk, after the next one.
            multiple: chunks within a prompt end at a multiple of this number, or beside a bidirectional image.
        """
        if self.num_computed_tokens < end < self.num_prompt_tokens:
            borders = [] if self.images is None or multiple == 1 else self.images.borders
            end = max([end - end % multiple, *borders[: bisect_right(borders, end)][-1:]])
        if self.images is not None:
            end = self.images.chunk_end(end)
        if self.layout is not None:
            end = self.layout.chunk_end(self.num_computed_tokens, end)
        return end

    @property
    def previous_key(self) -> bytes:
        """The key that the next one of ``block_keys`` follows."""
        if self.layout is not None:
            return self.layout.key_before(self.first_key, self.block_keys)
        return self.block_keys[-1] if self.block_keys else self.first_key

    @property
    def num_uncomputed_tokens(self) -> int:
        """Number of tokens that are not in the cache yet.

        Usually 1 while the sequence decodes. It is larger during prefill, which after a preemption includes the
        generated tokens, and after a grammar has forced several tokens at once. It is 0 if the last token is not known
        yet and certain to end the text.
        """
        if not self.num_unknown_tokens:
            return len(self.token_ids) - self.num_computed_tokens
        num_tokens = self.num_tokens
        return num_tokens - self.num_computed_tokens if num_tokens < self.max_length else 0

    @property
    def may_run_ahead(self) -> bool:
        """Whether a step may compute the sequence's next token, and draw the one after it, before the host knows it."""
        depends_on_text = self.grammar is not None or self.counts is not None or self.token_rules is not None
        depends_on_text |= bool(self.params.logits_processors)
        # Log-probabilities of a prompt are computed from hidden states, which the next step overwrites.
        return self.runs_ahead and not depends_on_text and not self.scores_prompt and not self.siblings

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of tokens of the prompt are still wanted."""
        return self.next_prompt_logprob is not None and self.next_prompt_logprob < self.num_prompt_tokens

    @property
    def num_tokens(self) -> int:
        """Number of tokens, those included that the host does not know yet."""
        return len(self.token_ids) + self.num_unknown_tokens

    @property
    def is_decoding(self) -> bool:
        """Whether all tokens that were present at admission are computed."""
        return self.num_computed_tokens >= self.num_prefill_tokens

    @property
    def priority(self) -> int:
        """The smaller, the more urgent."""
        return self.order[0]

    @property
    def num_slots(self) -> int:
        """Number of sequences that this one runs for: itself and its siblings."""
        return 1 + len(self.siblings)

    @property
    def num_output_tokens(self) -> int:
        """Number of generated tokens."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def prompt_as_read(self) -> list[int]:
        """The tokens of the prompt in the order in which they are read, as a new list."""
        prompt = self.token_ids[: self.num_prompt_tokens]
        return prompt if self.layout is None else self.layout.as_read(prompt)

    @property
    def output_token_ids(self) -> list[int]:
        """The generated tokens, as a new list."""
        return self.token_ids[self.num_prompt_tokens :]
