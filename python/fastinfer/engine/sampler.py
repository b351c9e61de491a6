"""From logits to the next tokens of every sequence."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastinfer import ops
from fastinfer.engine.batch_inputs import num_rows
from fastinfer.engine.grammar import Grammar
from fastinfer.engine.scheduler import Chunk
from fastinfer.engine.sequence import Sequence
from fastinfer.engine.transfer import to_device, to_host
from fastinfer.sampling_params import SamplingParams

# One for each recorded step, two where grammars come and go.
MAX_RECORDED_DRAWS = 256


class Row(NamedTuple):
    """Whose token a row of logits is for, the drafts that stand before it, and the grammar that it must follow. Rows
    with drafts come after the one without, each with one more.
    """

    sequence: Sequence
    drafts: list[int]
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token with the natural logarithm of its probability and its rank, 1 for the likeliest."""

    token_id: int
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A chosen token; ``logprobs`` holds it and the likeliest tokens of its position where the request asked.

    If none could be chosen, as the logits are not numbers, nothing is allowed or the grammar failed, it is -1, and
    ``error`` says why.
    """

    token_id: int
    logprobs: list[TokenLogprob] | None = None
    error: Exception | None = None


class Sampler:
    """Draws each row's token with its sequence's own parameters, all rows in one call.

    A draw depends on the request's seed and the token's position alone: neither its neighbours in the batch nor a
    preemption changes it. That is also why drafts are verified by drawing: a draft is accepted exactly if its token is
    the one that would have been drawn without it.

    Args:
        max_rows: rows at most.
        vocab_size: columns of the logits.
        eos_ids: forbidden before ``min_tokens``, as the request's own stop tokens are.
    """

    def __init__(self, max_rows: int, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        # Always in the same memory, where a recorded draw finds them.
        self._arrays: dict[str, np.ndarray] = {
            "temperature": np.zeros(max_rows, np.float32),
            "top_k": np.zeros(max_rows, np.int32),
            "top_p": np.zeros(max_rows, np.float32),
            "min_p": np.zeros(max_rows, np.float32),
            "seeds": np.zeros(max_rows, np.int64),
            "positions": np.zeros(max_rows, np.int64),
        }
        self._mask_words = np.zeros((max_rows, self._num_words), np.int32)
        self._sequences: list[Sequence] = []
        self._parameters: dict[str, Tensor] = {}
        self._are_usual = False  # see _is_usual
        # Of the logits. Asking a tensor for what it is takes 10 to 25 us after a step, when nothing of torch is cached.
        self._device, self._on_gpu = torch.device("cpu"), False
        self._recorded: dict[tuple[int, int, bool], tuple[ops.CPUGraph, Tensor, np.ndarray]] = {}
        self._memory = ops.GraphMemory()

    def draw(self, logits: Tensor, rows: list[Row], recorded: bool = False) -> list[SampledToken]:
        """One token for each row of logits [rows, vocab].

        Args:
            logits: of the model.
            rows: whose they are.
            recorded: the logits are a recorded step's, fp32, and the same tensor whenever it comes again. Then the draw
                is recorded as well: after a step the caches are cold, and the call alone takes longer than its kernel.
        """
        if not rows:
            return []
        # While a GPU still computes the logits; on a CPU the masks are read before they leave the caches.
        masks, errors = self._masks(rows)
        tokens = self._draw_each_or_all(logits, rows, masks, recorded)
        for index, error in errors.items():
            tokens[index] = SampledToken(-1, error=error)
        return tokens

    def _draw_each_or_all(
        self, logits: Tensor, rows: list[Row], masks: np.ndarray | None, recorded: bool = False
    ) -> list[SampledToken]:
        try:
            self._write(rows, logits)
            return (self._replay if recorded and self._are_usual else self._draw)(logits, rows, masks)
        except RuntimeError as error:
            if len(rows) == 1:
                return [SampledToken(-1, error=error.with_traceback(None))]
            # One row must not stop the others: who is to blame comes out when each is drawn alone.
            each = (slice(index, index + 1) for index in range(len(rows)))
            return [
                self._draw_each_or_all(logits[one], rows[one], None if masks is None else masks[one])[0] for one in each
            ]

    def _draw(self, logits: Tensor, rows: list[Row], masks: np.ndarray | None) -> list[SampledToken]:
        logits = logits.float()
        params = [row.sequence.params for row in rows]
        counts = [p.logprobs for p in params]
        sampled = ops.sample(
            logits,
            num_logprobs=max((count for count in counts if count is not None), default=None),
            **self._parameters,
            **self._penalties(rows),
            **self._bias(params),
            **self._mask(masks),
        )
        sampled = ops.Sampled(*to_host(list(sampled)))

        def drawn(row: int, token: int, count: int | None) -> SampledToken:
            if token < 0:  # a GPU cannot raise for one row
                reason = f"logits[{row}] must have a finite logit that is allowed, and no NaN"
                return SampledToken(-1, error=RuntimeError(reason))
            return SampledToken(token, None if count is None else _logprobs(logits, sampled, row, count))

        return [drawn(row, *pair) for row, pair in enumerate(zip(sampled.tokens.tolist(), counts, strict=True))]

    def _replay(self, logits: Tensor, rows: list[Row], masks: np.ndarray | None) -> list[SampledToken]:
        """Of rows that want nothing unusual, on the CPU."""
        key = id(logits), len(rows), masks is not None
        if key in self._recorded:
            graph, _, tokens = self._recorded[key] = self._recorded.pop(key)  # the last to be forgotten
            graph.replay()
        else:
            graph = ops.CPUGraph(self._memory)
            with graph.capture():
                sampled = ops.sample(logits, num_logprobs=None, **self._parameters, **self._mask(masks))
            tokens = sampled.tokens.numpy()
            if len(self._recorded) == MAX_RECORDED_DRAWS:
                del self._recorded[next(iter(self._recorded))]
            self._recorded[key] = graph, logits, tokens
        return [SampledToken(token) for token in tokens.tolist()]

    def _write(self, rows: list[Row], logits: Tensor) -> None:
        """Write down the parameters that every row has."""
        sequences = [row.sequence for row in rows]
        arrays, every = self._arrays, slice(len(rows))
        changed = sequences != self._sequences  # as a rule the same ones decode again
        if changed:
            self._sequences = sequences
            self._are_usual = all(map(_is_usual, sequences))
            self._device, self._on_gpu = logits.device, logits.is_cuda
            params = [sequence.params for sequence in sequences]
            arrays["temperature"][every] = [p.temperature for p in params]
            arrays["top_k"][every] = [max(p.top_k, 0) for p in params]
            arrays["top_p"][every] = [p.top_p for p in params]
            arrays["min_p"][every] = [p.min_p for p in params]
            arrays["seeds"][every] = [sequence.seed for sequence in sequences]
        positions = arrays["positions"]
        for index, (sequence, drafts, _) in enumerate(rows):
            positions[index] = len(sequence) + len(drafts)
        if changed:
            self._parameters = {name: to_device(array[every], self._device) for name, array in arrays.items()}
        elif self._on_gpu:
            self._parameters["positions"] = to_device(positions[every], self._device)

    def _penalties(self, rows: list[Row]) -> dict[str, Tensor]:
        if all(row.sequence.counts is None for row in rows):
            return {}
        penalties = np.tile(np.array([1, 0, 0], np.float32), (len(rows), 1))
        output = np.zeros((len(rows), self._vocab_size), np.int32)
        prompt = np.zeros((len(rows), self._num_words), np.int32)
        for index, (sequence, drafts, _) in enumerate(rows):
            if sequence.counts is not None:
                p = sequence.params
                penalties[index] = p.repetition_penalty, p.presence_penalty, p.frequency_penalty
                output[index] = sequence.counts.output
                np.add.at(output[index], drafts, 1)
                prompt[index] = sequence.counts.prompt
        arrays = {"penalties": penalties, "output_counts": output, "prompt_mask": prompt}
        return {name: to_device(array, self._device) for name, array in arrays.items()}

    def _bias(self, params: list[SamplingParams]) -> dict[str, Tensor]:
        biases = [p.logit_bias or {} for p in params]
        if not any(biases):
            return {}
        arrays = {
            "bias_start": np.cumsum([0, *map(len, biases)], dtype=np.int32),
            "bias_tokens": np.array([t for bias in biases for t in bias], np.int32),
            "bias_values": np.array([v for bias in biases for v in bias.values()], np.float32),
        }
        return {name: to_device(array, self._device) for name, array in arrays.items()}

    def _masks(self, rows: list[Row]) -> tuple[np.ndarray | None, dict[int, Exception]]:
        """What grammars and ``min_tokens`` allow, [rows, words] int32 if they forbid anything, and which rows' grammars
        failed.
        """
        early = [_is_early(row) for row in rows]
        if not any(early) and all(row.grammar is None for row in rows):
            return None, {}
        errors: dict[int, Exception] = {}
        masks = self._mask_words[: len(rows)]
        num_followed = 0  # drafts
        for index, row in enumerate(rows):
            masks[index] = -1
            if row.grammar is not None:
                try:
                    if row.drafts:
                        row.grammar.accept(row.drafts[-1])
                        num_followed += 1
                    row.grammar.fill_mask(masks[index])
                except Exception as error:  # whatever it is, the others live on
                    errors[index] = error.with_traceback(None)
                    masks[index] = -1
                if num_followed and (row is rows[-1] or not rows[index + 1].drafts):
                    num_followed, count = 0, num_followed
                    try:
                        row.grammar.rollback(count)
                    except Exception as error:  # a grammar that has failed once fails again
                        errors[index] = error.with_traceback(None)
            if early[index]:
                for token_id in self._eos_ids.union(row.sequence.params.stop_token_ids or ()):
                    masks[index].view(np.uint32)[token_id // 32] &= ~np.uint32(1 << token_id % 32)
        return masks, errors

    def _mask(self, masks: np.ndarray | None) -> dict[str, Tensor]:
        return {} if masks is None else {"mask": to_device(masks, self._device)}

    @property
    def _num_words(self) -> int:
        return -(-self._vocab_size // 32)


def rows_of(chunk: Chunk) -> list[Row]:
    """What a chunk's rows of logits are for.

    Drafts are dropped from the first one on that the grammar does not allow, or after which it leaves no choice: what
    it forces is appended without a draw.
    """
    if not num_rows(chunk):
        return []
    sequence = chunk.sequence
    if sequence.grammar is not None:
        chunk.drafts = chunk.drafts[: _num_allowed(chunk.drafts, sequence.grammar)]
    rows = [Row(owner, [], owner.grammar) for owner in (sequence, *sequence.siblings)]
    drafted = (chunk.drafts[: count + 1] for count in range(len(chunk.drafts)))
    return rows + [Row(sequence, drafts, sequence.grammar) for drafts in drafted]


def _num_allowed(drafts: list[int], grammar: Grammar) -> int:
    num_valid = grammar.validate(drafts) if drafts else 0
    for index, draft in enumerate(drafts[:num_valid]):
        grammar.accept(draft)
        if grammar.finished or grammar.forced_tokens():
            grammar.rollback(index + 1)
            return index
    grammar.rollback(num_valid)
    return num_valid


def _is_early(row: Row) -> bool:
    """Whether it is for a token that must not be the last."""
    sequence, least = row.sequence, row.sequence.params.min_tokens
    return least > 0 and sequence.num_output_tokens + len(row.drafts) < least


def _is_usual(sequence: Sequence) -> bool:
    """Whether it wants a token alone, drawn with the parameters that every row has, and perhaps a mask."""
    params = sequence.params
    return sequence.counts is None and params.logprobs is None and not params.logit_bias


def top_logprobs(logits: Tensor, token_id: int, count: int) -> list[TokenLogprob]:
    """The chosen token of one row [vocab], then the ``count`` likeliest ones, without the chosen one twice."""
    logprobs = torch.log_softmax(logits.clone(), dim=-1)  # aligned: a GPU may sum by where a row begins
    values, indices = logprobs.topk(min(count, logits.shape[-1]))
    return _ranked(logits, token_id, logprobs[token_id].item(), indices.tolist(), values.tolist())


def _logprobs(logits: Tensor, sampled: ops.Sampled, row: int, count: int) -> list[TokenLogprob]:
    """:func:`top_logprobs` of a row that was sampled, from what the sampling found out."""
    tokens, values = sampled.top_tokens[row, :count].tolist(), sampled.top_logprobs[row, :count].tolist()
    return _ranked(logits[row], int(sampled.tokens[row]), sampled.logprobs[row].item(), tokens, values)


def _ranked(logits: Tensor, chosen: int, logprob: float, tokens: list[int], values: list[float]) -> list[TokenLogprob]:
    rank = tokens.index(chosen) + 1 if chosen in tokens else int((logits > logits[chosen]).sum()) + 1
    ranked = zip(tokens, values, range(1, len(tokens) + 1), strict=True)
    return [TokenLogprob(chosen, logprob, rank), *(TokenLogprob(*entry) for entry in ranked if entry[0] != chosen)]
