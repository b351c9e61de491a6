"""Grammars that a generated text must match: compiled in the background, and applied as bit masks over the tokens.

The parser is llguidance (https://github.com/guidance-ai/llguidance): a lexer based on derivatives of regular
expressions below an Earley parser, which run over the trie of all tokens.
"""

import itertools
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from fastinfer.engine.grammar_source import check_installed, grammar_source, refusal, shorten
from fastinfer.engine.token_rules import allow
from fastinfer.errors import RequestError
from fastinfer.structured_output import StructuredOutputsParams
from fastinfer.tokenizers.tokenizer import Tokenizer
from fastinfer.utils.forks import renew_in_children

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Number of compiled grammars that are kept.
MAX_COMPILED = 64
# Longest constraint in characters that counts as short, and the number of threads for short ones and for long ones.
# Short ones compile in milliseconds, and must not wait for long ones, which take up to seconds.
SHORT_CHARS = 2**13
NUM_WORKERS = 2
# Time limit of one compilation.
COMPILE_SECONDS = 5.0
# Limit of the processor time for one mask. Typical masks take 10 to 100 us. Hostile patterns (a{1000000}) take most of
# a second, during which every other request would wait.
MASK_SECONDS = 0.25


class Grammar:
    """The parser's state after the tokens of one text.

    End-of-sequence tokens are treated like other tokens: the mask allows them where the text may end, and ``accept``
    and ``rollback`` take them. After an end-of-sequence token only further ones are allowed.

    Args:
        matcher: llguidance's matcher.
        eos_ids: end-of-sequence tokens.
        vocab_size: number of tokens of the tokenizer.
    """

    def __init__(self, matcher: "LLMatcher", eos_ids: frozenset[int], vocab_size: int) -> None:
        self._matcher = matcher
        self._eos_ids = eos_ids
        self._vocab_size = vocab_size
        self._num_words = -(-vocab_size // 32)
        self._num_accepted = 0  # without end-of-sequence tokens
        self._num_ends = 0

    @property
    def finished(self) -> bool:
        """Whether only the end of sequence may follow."""
        return self._num_ends > 0 or self._matcher.is_stopped()

    def fill_mask(self, words: np.ndarray) -> None:
        """Write the tokens that may come next, in the format of ``mask`` of :func:`fastinfer.ops.sample`.

        Args:
            words: [ceil(vocab / 32)] int32, contiguous, to write to; token t is bit t % 32 of word t // 32. Tokens
                beyond the tokenizer's vocabulary, which the logits may have, are forbidden.

        Raises:
            RequestError: the grammar has become too complex to follow.
        """
        if words.dtype != np.int32 or words.ndim != 1 or words.size < self._num_words or not words.flags.c_contiguous:
            raise ValueError(
                f"words: expected a contiguous [>= {self._num_words}] int32, got {list(words.shape)} {words.dtype}"
            )
        words[self._num_words :] = 0
        if self._num_ends:
            words[:] = 0
            for token_id in self._eos_ids:
                allow(words, token_id)
            return
        start = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, self._num_words * 4)
        self._check()
        if (seconds := time.thread_time() - start) > MASK_SECONDS:
            raise RequestError(
                f"structured output: a token takes {seconds:.1f} s, at most {MASK_SECONDS} s are allowed"
            )

    def accept(self, token_id: int) -> None:
        """Append a token.

        Raises:
            RequestError: the grammar does not allow the token here; the state is unchanged.
        """
        if token_id in self._eos_ids:
            allowed = self._may_end()
            self._num_ends += allowed
        else:
            allowed = not self._num_ends and self._matcher.try_consume_tokens([token_id]) == 1
            self._num_accepted += allowed
        if not allowed:
            self._check()
            raise RequestError(f"structured output: the grammar does not allow token {token_id} here")

    def rollback(self, n: int) -> None:
        """Undo ``accept`` for the last ``n`` tokens.

        Raises:
            ValueError: fewer tokens were accepted.
        """
        if not 0 <= n <= self._num_accepted + self._num_ends:
            raise ValueError(f"n: expected 0 to {self._num_accepted + self._num_ends}, got {n}")
        ends = min(n, self._num_ends)
        self._num_ends -= ends
        if n > ends:
            self._num_accepted -= n - ends
            self._matcher.rollback(n - ends)
            self._check()

    def replay(self, tokens: Sequence[int]) -> None:
        """Return to the state after exactly these tokens, whatever an interrupted call has left.

        Raises:
            RequestError: the grammar does not allow the tokens.
        """
        self._matcher.reset()
        self._num_accepted = self._num_ends = 0
        for token_id in tokens:
            self.accept(token_id)

    def forced_tokens(self) -> list[int]:
        """Return the tokens that must come next because the grammar allows only one text; empty if there is a choice.

        The caller may append and accept them without sampling. They are the tokenization of the only text that may
        follow, up to the point from which later text could change the tokenization. The end of sequence is not
        included, see :attr:`finished`.
        """
        return [] if self._num_ends else self._matcher.compute_ff_tokens()

    def validate(self, tokens: Sequence[int]) -> int:
        """Return the number of draft tokens, from the first on, that ``accept`` would allow in turn."""
        # A draft model may draw an id beyond the tokenizer's vocabulary, from which the matcher would never recover.
        tokens = list(itertools.takewhile(lambda token_id: token_id < self._vocab_size, tokens))
        end = next((i for i, token_id in enumerate(tokens) if token_id in self._eos_ids), len(tokens))
        if self._num_ends or end == 0:
            return _run_length(tokens, self._eos_ids) if self._may_end() else 0
        text = tokens[:end]
        num_valid: int = self._matcher.validate_tokens(text)
        if num_valid == end < len(tokens):
            self._matcher.consume_tokens(text)
            if self._may_end():
                num_valid += _run_length(tokens[end:], self._eos_ids)
            self._matcher.rollback(end)
        return num_valid

    def copy(self) -> "Grammar":
        """Return an independent grammar in the same state; takes about 5 us."""
        other = Grammar(self._matcher.deep_copy(), self._eos_ids, self._vocab_size)
        other._num_accepted, other._num_ends = self._num_accepted, self._num_ends
        return other

    def _may_end(self) -> bool:
        """Return whether the text may end here."""
        return self._num_ends > 0 or self._matcher.is_accepting()

    def _check(self) -> None:
        """Raise a RequestError if the matcher has failed."""
        if self._matcher.is_error():
            raise RequestError(f"structured output: {shorten(self._matcher.get_error())}")


class GrammarCompiler:
    """Compiles grammars for one tokenizer in worker threads, and keeps the most recently used ones.

    Short constraints have threads of their own: they wait only for short ones, and long ones only for long ones.

    Args:
        tokenizer: tokenizer of the model.
        vocab_size: number of columns of the logits; at least the tokenizer's number of tokens.
        time_limit: time limit of one compilation in seconds. Typical schemas take 1 to 5 ms.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, time_limit: float = COMPILE_SECONDS) -> None:
        if vocab_size < tokenizer.vocab_size:
            raise ValueError(f"vocab_size: expected at least {tokenizer.vocab_size}, got {vocab_size}")
        self.vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._time_limit = time_limit
        self._ll_tokenizer: LLTokenizer | None = None
        self.renew_after_fork()
        renew_in_children(self)

    def renew_after_fork(self) -> None:
        """Forget all compiled grammars: a forked child has none of the threads that compile them."""
        self._lock = threading.Lock()
        self._tokenizer_lock = threading.Lock()
        # The least recently used one comes first.
        self._compiled: OrderedDict[StructuredOutputsParams, Future[Grammar]] = OrderedDict()
        self._short_workers = ThreadPoolExecutor(NUM_WORKERS, thread_name_prefix="fastinfer-grammar-short")
        self._long_workers = ThreadPoolExecutor(NUM_WORKERS, thread_name_prefix="fastinfer-grammar-long")

    def submit(self, params: StructuredOutputsParams) -> "Future[Grammar]":
        """Compile a grammar in the background.

        Equal parameters are compiled once; each caller gets an independent grammar.

        Returns:
            A future of the grammar. It fails with a RequestError if the schema or pattern is invalid or not supported,
            if compilation exceeds the time limit, or if llguidance is not installed.
        """
        workers = self._short_workers if params.num_chars <= SHORT_CHARS else self._long_workers
        with self._lock:
            compiled = self._compiled.pop(params, None) or workers.submit(self._compile, params)
            self._compiled[params] = compiled
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        grammar: Future[Grammar] = Future()
        compiled.add_done_callback(lambda done: self._resolve(params, done, grammar))
        return grammar

    def _resolve(self, params: StructuredOutputsParams, done: "Future[Grammar]", grammar: "Future[Grammar]") -> None:
        """Resolve a caller's future with a copy of the compiled grammar, or with its error."""
        if not grammar.set_running_or_notify_cancel():
            return
        if (error := done.exception()) is None:
            grammar.set_result(done.result().copy())
            return
        with self._lock:  # the next attempt may succeed, for example after a timeout
            if self._compiled.get(params) is done:
                del self._compiled[params]
        grammar.set_exception(RequestError(str(error)) if isinstance(error, RequestError) else error)

    def _compile(self, params: StructuredOutputsParams) -> Grammar:
        """Compile a grammar within the time limit."""
        with self._tokenizer_lock:
            if self._ll_tokenizer is None:
                self._ll_tokenizer = _make_ll_tokenizer(self._tokenizer)
            tokenizer = self._ll_tokenizer
        # A compilation cannot be stopped, so it has its own thread; after the time limit only the compiler's own limits
        # end it.
        answer: queue.SimpleQueue[Grammar | Exception] = queue.SimpleQueue()

        def run() -> None:
            try:
                answer.put(_compile(params, tokenizer, self._tokenizer))
            except Exception as error:
                answer.put(error)

        threading.Thread(target=run, daemon=True, name="fastinfer-grammar-compile").start()
        try:
            result = answer.get(timeout=self._time_limit)
        except queue.Empty:
            raise RequestError(f"structured output: not compiled within {self._time_limit:g} s") from None
        if isinstance(result, Exception):
            raise result
        return result


def _make_ll_tokenizer(tokenizer: Tokenizer) -> "LLTokenizer":
    """Build the trie of all tokens; that takes 0.3 s for 49,000 of them.

    Raises:
        RequestError: llguidance is not installed, or the model has no end-of-sequence token.
    """
    check_installed()
    from llguidance import LLTokenizer, TokenizerWrapper

    if not tokenizer.eos_ids:
        raise RequestError("structured output needs a model with an end-of-sequence token, got one without")
    wrapper: Any = TokenizerWrapper(_Vocabulary(tokenizer))
    return LLTokenizer(wrapper, eos_token=sorted(tokenizer.eos_ids))


class _Vocabulary:
    """A tokenizer with the interface that llguidance requires.

    Args:
        tokenizer: tokenizer of the model.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokens = [tokenizer.token_bytes(i, skip_special_tokens=False) for i in range(tokenizer.vocab_size)]
        # Special tokens are never part of the text: the mask forbids them.
        self.special_token_ids = sorted(tokenizer.control_ids | tokenizer.eos_ids)
        self.eos_token_id = min(tokenizer.eos_ids)
        self.bos_token_id = tokenizer.bos_id
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False, parse_special=False, continues=True)


def _compile(params: StructuredOutputsParams, ll_tokenizer: "LLTokenizer", tokenizer: Tokenizer) -> Grammar:
    """Compile a grammar.

    Raises:
        RequestError: the schema, pattern or choice is invalid or not supported.
    """
    from llguidance import LLMatcher, LLParserLimits

    # A half to a tenth of the defaults, with which a schema can delay a step by 100 ms and use 500 MB.
    limits = LLParserLimits(
        step_lexer_fuel=100_000,
        step_max_items=20_000,
        max_lexer_states=50_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )
    try:
        matcher = LLMatcher(ll_tokenizer, grammar_source(params, tokenizer), log_level=0, limits=limits)
        if matcher.is_error():
            raise RequestError(shorten(matcher.get_error()))
        grammar = Grammar(matcher, tokenizer.eos_ids, tokenizer.vocab_size)
        # Computing a mask finds grammars that no text matches. It also creates lexer states, which all copies share and
        # which would otherwise slow down the first step.
        grammar.fill_mask(np.empty(-(-tokenizer.vocab_size // 32), np.int32))
    except (RequestError, ValueError) as error:
        raise refusal(params, str(error).removeprefix("structured output: ")) from None
    return grammar


def _run_length(tokens: Sequence[int], ids: frozenset[int]) -> int:
    """Return the number of tokens, from the first on, that are among ``ids``."""
    return next((i for i, token_id in enumerate(tokens) if token_id not in ids), len(tokens))
