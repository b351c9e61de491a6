"""Sampling of the next tokens from the logits of a step."""

import numpy as np
from torch import Tensor

from fastinfer import ops
from fastinfer.engine.draw import Draw
from fastinfer.engine.logits_processors import process_logits
from fastinfer.engine.logits_row import LogitsRow
from fastinfer.engine.recorded_draws import RecordedDraws
from fastinfer.engine.sampled_token import SampledToken, sampled_logprobs, top_logprobs
from fastinfer.engine.sampling_tensors import SamplingTensors
from fastinfer.engine.token_masks import TokenMasks
from fastinfer.engine.transfer import HostCopy


class Sampler:
    """Draws a token for each row of logits, with the parameters of the row's sequence, in one call for all rows.

    The noise of each draw depends on the sequence's seed, the position and the token alone, so neither the other rows
    nor a preemption change it. This also makes it possible to verify drafts by drawing: a draft is accepted if and only
    if it is the token that would have been drawn without speculation.

    Args:
        max_rows: maximum number of rows in a draw.
        vocab_size: number of columns of the logits.
        eos_ids: end-of-sequence tokens.

    Attributes:
        recorded: recorded draws for the logits of recorded steps.
        num_failed_draws: calls since the start that failed, for all rows or in their repetition for one row.
    """

    def __init__(self, max_rows: int, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self._tensors = SamplingTensors(max_rows, vocab_size)
        self._masks = TokenMasks(max_rows, vocab_size, eos_ids)
        self.recorded = RecordedDraws()
        self.num_failed_draws = 0

    def forget_recorded(self) -> None:
        """Drop the recorded draws, and with them the logits of recorded steps."""
        self.recorded = RecordedDraws()

    def launch(self, logits: Tensor, rows: list[LogitsRow], recorded: bool = False) -> Draw:
        """Start to draw one token for each row. A GPU draws them after all that was launched before.

        Args:
            logits: [rows, vocab] logits of the model.
            rows: description of each row.
            recorded: whether the logits are those of a recorded step, which are fp32 and always the same tensor. The
                draw is then recorded too.
        """
        if not rows:
            return Draw(list)
        # On a GPU the masks are computed while it still computes the logits; on a CPU they stay in the caches for the
        # draw.
        masks, errors = self._masks.compute(rows)
        processed, failed = process_logits(logits, rows)
        draw = self._launch_all_or_each(processed, rows, masks, recorded and processed is logits, logits)
        draw.errors = errors | failed
        return draw

    def draw(self, logits: Tensor, rows: list[LogitsRow], recorded: bool = False) -> list[SampledToken]:
        """Draw one token for each row as :meth:`launch` does, and wait for them."""
        return self.launch(logits, rows, recorded).tokens()

    def _launch_all_or_each(
        self, logits: Tensor, rows: list[LogitsRow], masks: np.ndarray | None, recorded: bool, model_logits: Tensor
    ) -> Draw:
        """Draw all rows in one call; if that fails, draw each row alone, so that only the faulty rows get an error.

        Args:
            logits: [rows, vocab] logits that the tokens are drawn from.
            rows: description of each row.
            masks: the allowed tokens; ``None`` for all.
            recorded: whether ``logits`` are those of a recorded step.
            model_logits: [rows, vocab] logits of the model, for the log-probabilities.
        """
        try:
            self._tensors.write(rows, logits)
            if recorded and self._tensors.needs_only_tokens:
                drawn = self.recorded.draw(
                    logits, len(rows), masks is not None, lambda: self._tensors.every_row | self._tensors.mask(masks)
                )
                tokens = [SampledToken(token) for token in drawn]
            else:
                return self._launch(logits, rows, masks, model_logits)
        except RuntimeError as error:
            self.num_failed_draws += 1
            if len(rows) == 1:
                tokens = [SampledToken(-1, error=error.with_traceback(None))]
            else:
                each = (slice(index, index + 1) for index in range(len(rows)))
                parts = (
                    self._launch_all_or_each(
                        logits[one], rows[one], None if masks is None else masks[one], False, model_logits[one]
                    )
                    for one in each
                )
                tokens = [part.tokens()[0] for part in parts]
        return Draw(lambda: tokens)

    def _launch(self, logits: Tensor, rows: list[LogitsRow], masks: np.ndarray | None, model_logits: Tensor) -> Draw:
        """Draw all rows in one call of the sampling operator."""
        logits = logits.float()
        counts = [row.sequence.params.logprobs for row in rows]
        results = ops.sample(
            logits,
            num_logprobs=max((count for count in counts if count is not None), default=None),
            **self._tensors.every_row,
            **self._tensors.penalties(rows),
            **self._tensors.bias(rows),
            **self._tensors.mask(masks),
        )
        copy = HostCopy(list(results))

        def collect() -> list[SampledToken]:
            sampled = ops.Sampled(*copy.wait())
            drawn = list(zip(sampled.tokens.tolist(), counts, strict=True))
            tokens = [_token(logits, sampled, row, *pair) for row, pair in enumerate(drawn)]
            for index, (token_id, count) in enumerate(drawn):
                if rows[index].processors and count is not None and token_id >= 0:
                    # The operator has seen the processed logits only.
                    tokens[index] = SampledToken(token_id, top_logprobs(model_logits[index].float(), token_id, count))
            return tokens

        return Draw(collect, results.tokens)


def _token(logits: Tensor, sampled: ops.Sampled, row: int, token_id: int, num_logprobs: int | None) -> SampledToken:
    """Return one row's token from the results of the sampling operator."""
    if token_id < 0:  # the GPU operator reports a faulty row in this way, as it cannot raise
        reason = f"logits[{row}] must have a finite logit that is allowed, and no NaN"
        return SampledToken(-1, error=RuntimeError(reason))
    if num_logprobs is None:
        return SampledToken(token_id)
    return SampledToken(token_id, sampled_logprobs(logits, sampled, row, num_logprobs))
