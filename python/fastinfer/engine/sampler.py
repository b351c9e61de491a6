"""Sampling of the next tokens from the logits of a step."""

import numpy as np
import torch
from torch import Tensor

from fastinfer import ops
from fastinfer.engine.batch_inputs import StepResult
from fastinfer.engine.draw import Draw
from fastinfer.engine.logits_processors import process_logits
from fastinfer.engine.logits_row import LogitsRow
from fastinfer.engine.penalty_tensors import PenaltyTensors
from fastinfer.engine.sampled_token import SampledToken, ranks, sampled_logprobs, top_logprobs
from fastinfer.engine.token_masks import TokenMasks
from fastinfer.engine.transfer import HostCopy, to_device


class Sampler:
    """Draws a token for each row of logits, with the parameters of the row's sequence, in one call for all rows.

    On a GPU the graph of a decode step has already drawn a token for each row. They are not used if any row has a mask,
    penalties, a bias, logits processors or log-probabilities.

    The noise of each draw depends on the sequence's seed, the position and the token alone, so neither the other rows
    nor a preemption change it. This also makes it possible to verify drafts by drawing: a draft is accepted if and only
    if it is the token that would have been drawn without speculation.

    Args:
        max_rows: maximum number of rows in a draw.
        vocab_size: number of columns of the logits.
        eos_ids: end-of-sequence tokens.

    Attributes:
        num_failed_draws: calls since the start that failed, for all rows or in their repetition for one row.
    """

    def __init__(self, max_rows: int, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self._penalties = PenaltyTensors(vocab_size)
        self._masks = TokenMasks(max_rows, vocab_size, eos_ids)
        self.num_failed_draws = 0

    def launch(self, result: StepResult, rows: list[LogitsRow]) -> Draw:
        """Start to draw one token for each row. A GPU draws them after all that was launched before.

        Args:
            result: result of the step.
            rows: description of each row of its logits.
        """
        if not rows:
            return Draw(list)
        logits, masks = result.logits, None
        errors: dict[int, Exception] = {}
        if not result.sampling.is_free:
            # On a GPU the masks are computed while it still computes the logits; on a CPU they stay in the caches for
            # the draw.
            masks, errors = self._masks.compute(rows)
            logits, failed = process_logits(logits, rows)
            errors |= failed
        needs_only_tokens = result.sampling.needs_only_tokens and logits is result.logits
        if needs_only_tokens and masks is None and result.tokens is not None:
            draw = _read(result.tokens)
        else:
            draw = self._launch_all_or_each(result, logits, rows, masks, needs_only_tokens)
        draw.errors = errors
        return draw

    def draw(self, result: StepResult, rows: list[LogitsRow]) -> list[SampledToken]:
        """Draw one token for each row as :meth:`launch` does, and wait for them."""
        return self.launch(result, rows).tokens()

    def _launch_all_or_each(
        self,
        result: StepResult,
        logits: Tensor,
        rows: list[LogitsRow],
        masks: np.ndarray | None,
        needs_only_tokens: bool,
    ) -> Draw:
        """Draw all rows in one call; if that fails, draw each row alone, so that only the faulty rows get an error.

        Args:
            result: result of the step.
            logits: [rows, vocab] logits that the tokens are drawn from.
            rows: description of each row.
            masks: the allowed tokens; ``None`` for all.
            needs_only_tokens: whether the logits are those of the model, and the draw has no other parameters than
                masks.
        """
        try:
            if needs_only_tokens and result.draws is not None:
                tokens = [SampledToken(token) for token in result.draws.draw(masks)]
            else:
                return self._launch(result, logits, rows, masks, slice(len(rows)))
        except RuntimeError as error:
            tokens = self._draw_each(result, logits, rows, masks, error)
        return Draw(lambda: tokens)

    def _draw_each(
        self, result: StepResult, logits: Tensor, rows: list[LogitsRow], masks: np.ndarray | None, error: RuntimeError
    ) -> list[SampledToken]:
        """Draw each row alone after the draw of all rows has failed with this error."""
        self.num_failed_draws += 1
        if len(rows) == 1:
            return [SampledToken(-1, error=error.with_traceback(None))]
        tokens = []
        for row in range(len(rows)):
            try:
                tokens += self._launch(result, logits, rows, masks, slice(row, row + 1)).tokens()
            except RuntimeError as failure:
                self.num_failed_draws += 1
                tokens.append(SampledToken(-1, error=failure.with_traceback(None)))
        return tokens

    def _launch(
        self, result: StepResult, logits: Tensor, rows: list[LogitsRow], masks: np.ndarray | None, part: slice
    ) -> Draw:
        """Draw a part of the rows in one call of the sampling operator."""
        sampling = result.sampling.tensors(len(rows))
        logits, rows, model_logits = logits[part].float(), rows[part], result.logits[part]
        counts = [row.sequence.params.logprobs for row in rows]
        results = ops.sample(
            logits,
            num_logprobs=max((count for count in counts if count is not None), default=None),
            mask=None if masks is None else to_device(masks[part], logits.device),
            **{name: tensor[part] for name, tensor in sampling.items()},
            **self._penalties.update(rows, logits.device),
            **_bias(rows, logits.device),
        )
        # The next step may overwrite the logits before this draw is collected.
        has_logprobs = any(count is not None for count in counts)
        copy = HostCopy([*results, ranks(logits, results.tokens)] if has_logprobs else list(results))

        def collect() -> list[SampledToken]:
            drawn = copy.wait()
            sampled = ops.Sampled(*drawn[: len(results)])
            tokens = _tokens(sampled.tokens)
            for index, (token, count) in enumerate(zip(tokens, counts, strict=True)):
                if count is None or token.error is not None:
                    continue
                if rows[index].processors:  # the operator has seen the processed logits only
                    logprobs = top_logprobs(model_logits[index].float(), token.token_id, count)
                else:
                    logprobs = sampled_logprobs(sampled, drawn[-1], index, count)
                tokens[index] = SampledToken(token.token_id, logprobs)
            return tokens

        return Draw(collect, results.tokens)


def _read(drawn: Tensor) -> Draw:
    """Return the tokens that the graph of a step has drawn, [rows] int64, as a draw."""
    copy = HostCopy([drawn])
    return Draw(lambda: _tokens(*copy.wait()), drawn)


def _tokens(drawn: Tensor) -> list[SampledToken]:
    """Return the tokens that the sampling operator has drawn, or for faulty rows an error."""
    tokens = []
    for row, token_id in enumerate(drawn.tolist()):
        # The GPU operator reports a faulty row in this way, as it cannot raise.
        reason = f"logits[{row}] must have a finite logit that is allowed, and no NaN"
        tokens.append(SampledToken(token_id, error=RuntimeError(reason) if token_id < 0 else None))
    return tokens


def _bias(rows: list[LogitsRow], device: torch.device) -> dict[str, Tensor]:
    """Return the logit biases of a draw; empty if no row has any."""
    biases = [row.sequence.params.logit_bias or {} for row in rows]
    if not any(biases):
        return {}
    arrays = {
        "bias_start": np.cumsum([0, *map(len, biases)], dtype=np.int32),
        "bias_tokens": np.array([t for bias in biases for t in bias], np.int32),
        "bias_values": np.array([v for bias in biases for v in bias.values()], np.float32),
    }
    return {name: to_device(array, device) for name, array in arrays.items()}
